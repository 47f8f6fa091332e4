"""README and docs are true: their code runs, their tables are complete."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import stat
from pathlib import Path

import typer

from fastdeploy_cache import CacheConfig, KVLayout, PeerConfig, PrefixCacheManager, StorageConfig, TransferConfig
from fastdeploy_cache.callers.blocks import CallerBlocks
from fastdeploy_cache.callers.copies import BlockCopies
from fastdeploy_cache.callers.own_units import CallerUnits
from fastdeploy_cache.callers.view import BlockView
from fastdeploy_cache.config.events import EventsConfig
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.config.tables import LISTS
from fastdeploy_cache.insight.control.control import Control
from fastdeploy_cache.insight.insight import Insight
from fastdeploy_cache.ipc.peer_channel import make_keys
from fastdeploy_cache.ipc.private_directory import PrivateDirectory
from fastdeploy_cache.ipc.private_socket import PrivateListener
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.server.limits import Limits
from fastdeploy_cache.launch.server.router import MAX_BODY_BYTES
from fastdeploy_cache.life_cycle import LifeCycle
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.metrics.picture import Picture
from fastdeploy_cache.peers.peers import Peers
from fastdeploy_cache.ranks import RankAccess
from fastdeploy_cache.storage.access import StorageAccess
from fastdeploy_cache.transfer_manager.peer.signature import make_secret
from fastdeploy_cache.transfer_manager.storage.file_disk import Disk

ROOT = Path(__file__).parent.parent
TABLES = ("layout", "transfer", "storage", "peer", "insight", "events")
WITHOUT_SAMPLES = {  # families that have none at first
    f"fastdeploy_cache_what_if_{name}": ("tier", "factor", "policy") for name in ("hit_rate", "saved_seconds")
}
SPLIT = ("fastdeploy_cache", "transfer_manager", "launch")  # into rooms


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_first_samples_are_short() -> None:
    """What a reader meets first is read at one look. That it runs is held by tests/test_doc_blocks.py."""
    assert len(blocks("README.md", "python")[0].splitlines()) <= 14
    for page in ("adapters/fastdeploy", "adapters/sglang", "adapter_verbs", "prefill_decode", "control"):
        sample = blocks(f"docs/{page}.md", "python")
        code = next(each for each in sample if not each.startswith("# fragment"))
        lines = [line for line in code.splitlines() if line and not line.startswith(("#", "from", "import"))]
        assert len(lines) <= 15, page


def test_the_readme_configuration_is_valid() -> None:
    """The second sample builds a configuration."""
    names = {"CacheConfig": CacheConfig, "KVLayout": KVLayout, "TransferConfig": TransferConfig}
    exec(blocks("README.md", "python")[1], names)
    assert names["config"].pool_sizes() == (100, 400)  # type: ignore[attr-defined]


def is_room(path: Path) -> bool:
    return not path.is_symlink() and (path / "__init__.py").exists()


def names_in(path: Path) -> set[str]:
    """What a module defines: functions, classes, and the methods of these as `Class.method`."""
    definition = ast.FunctionDef | ast.ClassDef
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, definition)]
    below = {(node, each) for node in top if isinstance(node, ast.ClassDef) for each in node.body}
    methods = {f"{node.name}.{each.name}" for node, each in below if isinstance(each, ast.FunctionDef)}
    return {node.name for node in top} | methods


def test_the_architecture_names_what_is_there() -> None:
    """Each path in it exists, each step of a walk is a function or class of the file that is named beside it, each room
    has its row, and each of four features that are asked for has its room."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = re.findall(r"`([\w./]+(?:\.py|/))`", text)
    assert len(paths) > 20
    assert not [path for path in paths if not any((home / path).exists() for home in (ROOT, ROOT / "fastdeploy_cache"))]
    steps = re.findall(r"^(\S+\.py) +· (\S+) +· \S", text, re.MULTILINE)
    assert len(steps) == 4 * 6
    assert not [step for step in steps if step[1] not in names_in(ROOT / "fastdeploy_cache" / step[0])]
    rows = text.partition("## Where does my change go?")[2].partition("\n## ")[0]
    rooms = {f"{each.parent.name}/{each.name}/" for name in SPLIT for each in (ROOT / name).iterdir() if is_room(each)}
    assert not [room for room in (*rooms, "ipc/", "metrics/") if f"`{room}`" not in rows]
    features = re.findall(r"^- \*\*(.+?)\*\*.*?: `(fastdeploy_cache/\w+/)`", rows, re.MULTILINE)
    assert [name for name, _ in features] == ["KV events", "A group of KV", "A tenant's quota", "A time to live"]


def test_the_architecture_is_short() -> None:
    """At most 125 lines of at most 100 columns."""
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    assert len(lines) <= 125
    assert max(map(len, lines)) <= 100


def test_every_adapter_has_its_page_and_is_named() -> None:
    """A page under docs/adapters for each adapter, named in the README and in docs/adapters.md, and no page for
    others."""
    pages = {path.stem for path in (ROOT / "docs/adapters").glob("*.md")}
    sglang = {"sglang", "sglang_hicache", "sglang_linker", "mini_sglang"}
    assert pages == {"fastdeploy", *sglang, "vllm", "vllm_connector", "slots"}
    readme = (ROOT / "README.md").read_text()
    assert all(f"(docs/adapters/{page}.md)" in readme for page in pages)
    overview = (ROOT / "docs/adapters.md").read_text()
    assert all(f"(adapters/{page}.md)" in overview for page in pages)


def test_the_verbs_in_pages_are_there() -> None:
    """Whatever pages call `cache.PART.verb`, and `cache.verb(` outside the pages of adapters, exists."""
    parts = {"storage": StorageAccess, "peers": Peers, "blocks": CallerBlocks, "ranks": RankAccess, "life": LifeCycle}
    parts |= {"insight": Insight, "control": Control}
    parts |= {"blocks.copies": BlockCopies, "blocks.view": BlockView, "blocks.units": CallerUnits}
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text()
        for part, verb in re.findall(
            r"\bcache\.((?:storage|peers|blocks|ranks|life|insight|control)(?:\.copies|\.view|\.units)?)\.(\w+)", text
        ):
            assert verb in {"copies", "view", "units"} or hasattr(parts[part], verb), f"{page}: cache.{part}.{verb}"
        if page.parent.name != "adapters":
            for verb in re.findall(r"\bcache\.(\w+)\(", text):
                assert hasattr(PrefixCacheManager, verb), f"{page}: cache.{verb}"


def test_every_verb_of_the_manager_is_in_a_page() -> None:
    """With each of its keywords: what no page shows, nobody finds."""
    text = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    verbs = inspect.getmembers(PrefixCacheManager, lambda each: inspect.isfunction(each) and each.__name__[0] != "_")
    keywords = {
        (name, parameter.name)
        for name, verb in verbs
        for parameter in inspect.signature(verb).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert not [name for name, _ in verbs if not re.search(rf"\bcache\.{name}\(", text)]
    assert not [pair for pair in keywords if not re.search(rf"\b{pair[1]}\b", text)]


def test_decisions_are_short() -> None:
    """Each has a number of its own and at most ten lines of text; the rows of its tables are not counted."""
    entries = re.split(r"^#+ ", without_tables((ROOT / "DECISIONS.md").read_text()), flags=re.MULTILINE)
    numbered = [each.strip().splitlines() for each in entries if re.match(r"\d+\. ", each)]
    numbers = [lines[0].partition(".")[0] for lines in numbered]
    assert len(set(numbers)) == len(numbers) >= 60
    assert max(map(len, numbered)) <= 1 + 10


def test_decisions_are_in_short_sentences() -> None:
    """At most 20 words in the mean: a sentence of a riddle or a telegram is long, as it says many things at once."""
    assert words_per_sentence((ROOT / "DECISIONS.md").read_text()) <= 20
    assert words_per_sentence("# No text\nOne two. Is it `a. b. c`?\n| no | text |\n```\nno text\n```\n1.5 it.") == 2


def words_per_sentence(page: str) -> float:
    """The mean of a page's text: headings, tables and code do not count, and a full stop before a space ends one."""
    text = re.sub(r"^```.*?^```|^#.*?$|`[^`]*`", "", without_tables(page), flags=re.MULTILINE | re.DOTALL)
    sentences = [each.split() for each in re.split(r"[.?!]\s+|\n\s*\n", text)]
    num_words = [sum(any(map(str.isalnum, word)) for word in words) for words in sentences]
    return sum(num_words) / sum(map(bool, num_words))


def without_tables(page: str) -> str:
    return re.sub(r"^\|.*\n?", "", page, flags=re.MULTILINE)


def test_the_readme_is_short() -> None:
    """At most 150 lines."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


COMPARED = ["this cache", "vLLM's tiers", "HiCache", "LMCache", "KVBM", "FlexKV", "TensorRT-LLM", "KVCR", "FastDeploy"]
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"


def test_the_comparison_says_what_was_looked_at() -> None:
    """Each table has all caches, and a cell for each of its questions: a dash, or a claim with the numbers of its
    sources. Each source has a version or a commit, and the month in which it was read."""
    text, _, listed = (ROOT / "docs/comparison.md").read_text().partition("\n## Sources\n")
    sources = dict(re.findall(r"^(\d+)\. (.*?)(?=\n\d+\. |\Z)", listed, re.MULTILINE | re.DOTALL))
    unclear = [
        number
        for number, source in sources.items()
        if not re.search(rf"(?: \d+\.\d+|commit `\w{{8}}`).*\((?:{MONTHS}) 20\d\d\)", " ".join(source.split()))
    ]
    assert list(sources) == [str(number + 1) for number in range(len(sources))] and not unclear
    tables = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    assert len(tables) >= 10
    for header, _, *rows in tables:
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (header, *rows)]
        assert [row[0] for row in cells] == ["", *COMPARED], header
        for row in cells[1:]:
            assert len(row) == len(cells[0]), row
            claims = [cell for cell in row[1:] if cell != "\N{EN DASH}"]
            assert not [claim for claim in claims if not re.fullmatch(r"[^[\]]+(?: \[\d+\])+", claim)], row
    named = re.findall(r" \[(\d+)\](?!\()", text)
    assert set(named) == set(sources)


def test_links_between_pages_lead_somewhere() -> None:
    """Each relative link of a page names a file that is there and, behind a #, one of its headings."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if not link.startswith("http") and not leads_somewhere(page, *link.partition("#")[::2])
    ]
    assert not broken


def leads_somewhere(page: Path, file: str, heading: str) -> bool:
    target = page.parent / file if file else page
    if not target.exists() or not heading:
        return target.exists()
    headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
    return heading in {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


def test_messages_that_name_a_page_say_where_it_is() -> None:
    """A wheel has no pages: what a program prints, and what it deploys, says that they are the source's."""
    found, num_named = [], 0
    for file in [*ROOT.glob("launch/background/deploy/**/*"), *code_of("fastdeploy_cache", *LINKED)]:
        texts = strings_of(file) if file.suffix == ".py" else file.read_text().splitlines() if file.is_file() else []
        for text in texts:
            for behind in re.findall(r"docs/\w+\.md([^\n]*)", text):
                num_named += 1
                if not behind.startswith((" of the source", "#")) and text not in DEFAULTS:
                    found.append(f"{file.name}: {text}")
    assert not found and num_named > 10


LINKED = ("ipc", "metrics", "transfer_manager", "launch")
_OF_REPORT = {"docs/benchmark.md", "docs/gpu.md", "docs/storage.md", "docs/trust.md"}  # what `Report` is given
DEFAULTS = _OF_REPORT | {"/docs/engine.md"}  # a step of a checkout


def code_of(*packages: str) -> list[Path]:
    return [file for package in packages for file in (ROOT / package).rglob("*.py")]


def strings_of(file: Path) -> list[str]:
    """What a module may print; the docstring of the module itself apart, which only its readers see."""
    tree = ast.parse(file.read_text())
    own = ast.get_docstring(tree, clean=False)
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [text for text in strings if isinstance(text, str) and text != own]


def test_the_documented_toml_is_valid(tmp_path: Path) -> None:
    """The file in docs/configuration.md loads."""
    path = tmp_path / "cache.toml"
    path.write_text(blocks("docs/configuration.md", "toml")[0])
    assert CacheConfig.load(path, environment={}).transfer.tp_size == 2


def test_every_setting_is_documented() -> None:
    """docs/configuration.md has a row for every key, with its true default, and none for others."""
    text = (ROOT / "docs/configuration.md").read_text()
    listed = re.findall(r"^- `([\w.]+)`(?: \(default ([^)]*)\))?: \S", text, re.MULTILINE)
    rows = dict(listed)
    assert len(rows) == len(listed)
    fields = {f.name: f for f in dataclasses.fields(CacheConfig) if f.name not in TABLES}
    fields |= {f"layout.{f.name}": f for f in dataclasses.fields(KVLayout)}
    fields |= {f"transfer.{f.name}": f for f in dataclasses.fields(TransferConfig)}
    fields |= {f"storage.{f.name}": f for f in dataclasses.fields(StorageConfig)}
    fields |= {f"peer.{f.name}": f for f in dataclasses.fields(PeerConfig)}
    fields |= {f"insight.{f.name}": f for f in dataclasses.fields(InsightConfig)}
    fields |= {f"events.{f.name}": f for f in dataclasses.fields(EventsConfig)}
    fields |= {f"{name}.{f.name}": f for name, of in LISTS.items() for f in dataclasses.fields(of)}
    assert rows.keys() == fields.keys()
    for name, field in fields.items():
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            assert rows[name].strip("` ") == f"{field.default:.12g}", name


def test_every_metric_is_documented() -> None:
    """docs/metrics.md has a row for every family with its type and labels, and none for others."""
    text = (ROOT / "docs/metrics.md").read_text()
    rows = {
        (n, t, tuple(re.findall(r"`(\w+)`", ls)))
        for n, t, ls in re.findall(r"^- `(\w+)` \((\w+)(?:; labels? ([^)]*))?\): \S", text, re.MULTILINE)
    }
    metrics, families = CacheMetrics(), set()
    picture = Picture(
        blocks=[("gpu", "free", 1)],
        units=[("state", "free", 1)],
        tenants=[("90f", "gpu", "used", 1)],
        ranks=[(0, True, 0)],
        processes=[("transfer", 0, 0)],
    )
    metrics.observe(lambda: picture)
    for family in metrics.collect():
        name = family.name.removeprefix("fastdeploy_cache_") + ("_total" if family.type == "counter" else "")
        of_one = family.samples[0].labels if family.samples else WITHOUT_SAMPLES[family.name]
        labels = tuple(label for label in of_one if label not in {"dp", "le"})
        families.add((name, family.type, labels))
    assert rows == families


def default_of(command: str, option: str) -> object:
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return next(each.default for each in parameters if each.name == option)


def test_the_security_page_is_linked_and_short() -> None:
    """The README leads to it; it is a page of plain lines."""
    page = (ROOT / "SECURITY.md").read_text().splitlines()
    assert "[SECURITY.md](SECURITY.md)" in (ROOT / "README.md").read_text()
    assert len(page) <= 120
    assert max(map(len, page)) <= 120


def test_the_security_page_names_the_ports_and_bounds_that_are() -> None:
    """Who listens where by default, how much is read, and how much of a group one client may use up."""
    page = " ".join((ROOT / "SECURITY.md").read_text().split())
    hosts = {default_of("serve", "host"), default_of("route", "host")}
    hosts.add(inspect.signature(PrefixCacheManager.serve_metrics).parameters["host"].default)
    assert hosts == {"127.0.0.1"} and "The HTTP ports listen on 127.0.0.1 unless" in page
    assert f"API of `serve` ({default_of('serve', 'port')}) or of the router ({default_of('route', 'port')})" in page
    assert f"metrics ({default_of('serve', 'metrics_port')})" in page
    bodies = [num_bytes // 2**20 for num_bytes in (Limits().max_body_bytes, MAX_BODY_BYTES)]
    assert f"{bodies[0]} MiB for a body (router: {bodies[1]} MiB)" in page
    assert (
        PeerConfig(weights_id="w").secret_file is None and "without it, whoever can call `receive` is believed" in page
    )


def test_the_security_page_names_the_rights_that_are(tmp_path: Path) -> None:
    """Of what is made for sockets, keys, secrets, stores and words, whatever the umask is."""
    os_umask = os.umask(0)
    try:
        make_keys(tmp_path / "keys")
        make_secret(tmp_path / "secret")
        Disk().make_folder(tmp_path / "store")
        os.close(Disk().open(tmp_path / "store" / "file", create=True))
        listener = PrivateListener(tmp_path / "control" / "socket")
        sockets = PrivateDirectory()
    finally:
        os.umask(os_umask)
    modes = {
        name: stat.S_IMODE((tmp_path / name).stat().st_mode)
        for name in ("keys", "keys/own.key_secret", "secret", "store", "store/file", "control", "control/socket")
    }
    sockets_mode = stat.S_IMODE(sockets.path.stat().st_mode)
    listener.close()
    sockets.remove()
    assert {mode for name, mode in modes.items() if name in ("keys", "store", "control")} == {sockets_mode} == {0o700}
    assert {mode for name, mode in modes.items() if name not in ("keys", "store", "control")} == {0o600}
