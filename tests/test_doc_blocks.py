"""Every block of code in README.md and docs/ is run here, or says why it is not.

- `python` runs as it stands, and prints what its comments, or the block of `text` behind it, promise. A fragment begins
  with `# fragment: REASON`; a program that cannot run here stands below `<!-- not run: REASON -->`. Both must compile.
- `toml` is loaded as settings, and `json` is parsed.
- Of `bash` and `console` each command is run where `RUN` says how, and has a reason in `NOT_RUN` otherwise. Commands of
  this package are read by the real command line in any case, without running them, and scripts by the commands that
  they call. What a page shows behind a `$ ` that is run has to be what it prints.
- `text` is what programs print, and drawings.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.launch.cli import app
from tests.rigs.pages import ROOT, Block, Command, blocks, commands_of, mentions, split_commands

BLOCKS = blocks()
LANGUAGES = {"python", "toml", "json", "bash", "console", "text"}
PROGRAM = "docs/embed.md"  # its blocks, one below the other, are an example, which tests/test_examples.py runs
COMMANDS = [command for block in BLOCKS if block.language in {"bash", "console"} for command in commands_of(block)]
OURS = "fastdeploy-cache"
RUN = ("config", "simulate ", "deploy", "peer-secret group.secret")  # cheap, and harmless in a new folder
NOT_RUN = {  # how a command begins: why it is not run here
    "fastdeploy-cache simulate-faults": "takes minutes: tests/simulation/test_command.py runs it shorter",
    "fastdeploy-cache soak": "takes minutes: tests/simulation/test_soak.py runs it shorter",
    "python -m tests.model.replay_stories": "takes an hour: tests/model/test_repeated.py runs a few stories",
    "fastdeploy-cache start": "starts a server: tests/launch/test_scripts.py does",
    "fastdeploy-cache status": "looks at a server: tests/launch/test_scripts.py does",
    "fastdeploy-cache stop": "ends a server: tests/launch/test_scripts.py does",
    "fastdeploy-cache control": "tells a server: tests/launch/test_scripts.py does",
    "fastdeploy-cache explain": "asks a server: tests/launch/test_serve_control.py does",
    "fastdeploy-cache doctor": "asks a server: tests/launch/test_serve_control.py does",
    "fastdeploy-cache serve": "is a server: tests/launch/test_serve.py has it",
    "fastdeploy-cache route": "is a router: tests/launch/test_router.py has it",
    "fastdeploy-cache up": "starts a group: tests/launch/test_scripts.py does",
    "fastdeploy-cache peer-": "writes below /etc",
    "fastdeploy-cache bench": "measures for minutes: tests/launch/test_bench.py and those beside it, made small",
    "fastdeploy-cache storage": "needs the store of the page: tests/launch/test_storage_command.py has another",
    "./launch/quickstart.sh": "runs for minutes: tests/launch/test_demo.py has the demo",
    "./launch/test.sh": "runs these tests",
    "./launch/docs.sh": "builds the site: .ci/run does",
    "./launch/start.sh": "starts a server: tests/launch/test_scripts.py does",
    "./launch/stop.sh": "ends a server: tests/launch/test_scripts.py does",
    "./launch/engines.sh": "installs an engine: .ci/run does, for vLLM",
    "./launch/gpu.sh": "needs a GPU",
    "runuser": "needs root, and a service of systemd",
    "pip": "fetches packages",
    "python3 -m venv": "makes an environment: launch/environment.sh does, for tests/launch/test_scripts.py",
    ". .venv/bin/activate": "changes the shell",
    "python3 -m pip": "fetches packages",
    "python3.12 -m pip": "fetches packages",
    "unzip": "needs what pip has fetched",
    "curl": "asks a server",
    "python3 -c": "asks a server, as curl does",
    "grep": "reads what curl prints",
    "prometheus": "is a server: tests/launch/test_scripts.py has it",
    "vllm serve": "needs vLLM and a model: .ci/run has a vLLM",
    "python -m sglang": "needs SGLang",
    "python -m fastdeploy_cache.adapters.fastdeploy.run": "needs FastDeploy",
}
SCRIPTS = {  # what a script hands its arguments on to; of the others, each option stands in the script or beside it
    "quickstart.sh": ("demo",),
    "start.sh": ("start",),
    "stop.sh": ("stop",),
    "status.sh": ("status",),
    "control.sh": ("control",),
    "start_prefill_decode.sh": ("up",),
    "engines.sh": ("engines",),
}


def names_of(some: list[Block]) -> list[str]:
    return [block.name for block in some]


def test_every_block_says_what_it_is() -> None:
    """Each has one of the languages above, pages have many, and no code is only indented."""
    assert not [block.name for block in BLOCKS if block.language not in LANGUAGES]
    texts = [block for block in BLOCKS if block.language == "text"]
    assert not [block.name for block in texts if re.search(r"^\$ ", block.text, re.MULTILINE)]
    assert len(BLOCKS) > 60
    indented = r"\n\n {4}(?:pip|python|fastdeploy-cache|\./launch|curl|from|import) "
    assert not [page for page in {block.page for block in BLOCKS} if re.search(indented, (ROOT / page).read_text())]


def test_blocks_that_are_not_run_are_these() -> None:
    """Fragments, a program that needs vLLM, and four looks at what serves. Each says why it is not run."""
    not_run = [block for block in BLOCKS if block.reason]
    assert Counter((block.page, block.language) for block in not_run) == {
        ("docs/adapters/fastdeploy.md", "python"): 5,
        ("docs/adapters/slots.md", "python"): 1,
        ("docs/adapters/vllm_connector.md", "python"): 1,
        ("docs/data_plane.md", "python"): 2,
        ("docs/engine.md", "python"): 2,
        ("docs/explain.md", "python"): 1,
        ("docs/control.md", "console"): 1,
        ("docs/tenants.md", "console"): 1,
        ("docs/operate.md", "console"): 2,
    }
    assert not [block.name for block in not_run if len(str(block.reason).split()) < 4]


FRAGMENTS = [block for block in BLOCKS if block.language == "python" and block.reason]
WHOLE = [b for b in BLOCKS if b.language == "python" and not b.reason and b.page != PROGRAM]


@pytest.mark.parametrize("block", FRAGMENTS, ids=names_of(FRAGMENTS))
def test_fragments_compile(block: Block) -> None:
    """What is not run is Python all the same."""
    compile(block.text, block.name, "exec")


ENGINE = """
from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, Request
config = CacheConfig(block_size=4, num_gpu_blocks=8, transfer_client="inline")
cache = PrefixCacheManager(config)
request = Request(request_id="a", prompt_token_ids=range(20))
block_ids = cache.match(request).wait().block_ids
"""
GIVEN = {  # what the fragments of a page leave to their reader, where that is little enough to be given here
    "docs/engine.md": ENGINE,
    "docs/explain.md": ENGINE,
    "docs/adapters/slots.md": """
from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager
from fastdeploy_cache.adapters.slots.prefix_cache import SlotPrefixCache
layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8)
config = CacheConfig(block_size=64, num_gpu_blocks=8, layout=layout)
cache, tokens, target_slot = SlotPrefixCache(max_capacity=512), list(range(10)), 1
cache.insert(tokens, 0, 0)
""",
}
COMPLETED = [block for block in FRAGMENTS if block.page in GIVEN]


@pytest.mark.processes
@pytest.mark.parametrize("block", COMPLETED, ids=names_of(COMPLETED))
def test_fragments_run_with_what_they_leave_out(block: Block, tmp_path: Path) -> None:
    """The calls in them are there, and take what they are given."""
    command = [sys.executable, "-c", GIVEN[block.page] + block.text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def promised(block: Block) -> list[str]:
    """What a block says that it prints: comments at its end, else the text behind it, else comments behind prints."""
    last = re.search(r"(?:^# .*\n)+\Z", block.text, re.MULTILINE)
    if last:
        return [line.removeprefix("# ") for line in last.group().splitlines()]
    following = BLOCKS[BLOCKS.index(block) + 1] if block != BLOCKS[-1] else block
    if following.page == block.page and following.language == "text" and "print(" in block.text.splitlines()[-1]:
        return following.text.splitlines()
    return re.findall(r"print\(.*\)  # (.*)", block.text)


def without_times(line: str) -> str:
    return re.sub(r"\d+(\.\d+)? ms\b", "N ms", line)


@pytest.mark.processes
@pytest.mark.parametrize("block", WHOLE, ids=names_of(WHOLE))
def test_python_prints_what_it_says(block: Block, tmp_path: Path) -> None:
    """It runs by itself in an empty folder. A line that it prints is a promised one, or the beginning of one."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", block.text]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    printed, expected = done.stdout.splitlines(), promised(block)
    assert len(printed) == len(expected), done.stdout
    for line, promise in zip(printed, expected, strict=True):
        assert without_times(promise).startswith(without_times(line)), done.stdout


TOML = [block for block in BLOCKS if block.language == "toml"]


@pytest.mark.parametrize("block", TOML, ids=names_of(TOML))
def test_settings_load(block: Block, tmp_path: Path) -> None:
    """A file as it stands; what it leaves to its reader, the layout and the sizes, is given."""
    path = tmp_path / "cache.toml"
    path.write_text(block.text)
    given = tomllib.loads(block.text)
    more: dict[str, Any] = {} if "layout" in given else {"layout": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8}}
    more |= {} if "num_gpu_blocks" in given or "gpu_memory_bytes" in given else {"num_gpu_blocks": 8}
    CacheConfig.load(path, environment={}, **more)


def test_json_is_json() -> None:
    """Each line of such a block."""
    lines = [line for block in BLOCKS if block.language == "json" for line in block.text.splitlines()]
    assert lines
    assert all(json.loads(line) for line in lines)


def parse(words: tuple[str, ...]) -> None:
    """Have the real command line read it, without running it. Options of `start` that are not its own are `serve`'s."""
    group: Any = typer.main.get_command(app)
    context = group.make_context(OURS, list(words))
    while hasattr(group, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, group, rest = group.resolve_command(context, rest)
        context = group.make_context(name, rest, parent=context)
        if name == "start":
            parse(("serve", *context.args))


def not_parsed(words: tuple[str, ...]) -> str | None:
    try:
        parse(words)
    except Exception as error:  # whatever it says of them
        return str(error) or type(error).__name__
    return None


def test_commands_are_such_as_the_command_line_takes() -> None:
    """Each of this package, with its options and their values, and each script with what it hands on."""
    broken = []
    for command in COMMANDS:
        program, *arguments = command.words
        if program == OURS and (error := not_parsed(tuple(arguments))):
            broken.append(f"{command.block.name}: {' '.join(command.words)}: {error}")
        if program.startswith("./launch/") and (error := not_taken(program, arguments)):
            broken.append(f"{command.block.name}: {' '.join(command.words)}: {error}")
    assert not broken
    assert sum(command.words[0] == OURS for command in COMMANDS) > 30


def not_taken(program: str, arguments: list[str]) -> str | None:
    """What is wrong with a call of a script in launch/."""
    script = ROOT / program
    if not os.access(script, os.X_OK):
        return "there is no such script"
    if script.name in SCRIPTS:
        return not_parsed((*SCRIPTS[script.name], *arguments))
    beside = [script, ROOT / "tests/rigs/fast_door.py", *(ROOT / "launch" / script.stem).glob("*.py")]
    texts = "".join(path.read_text() for path in beside if path.exists())
    unknown = [word for word in arguments if word.startswith("--") and word not in texts]
    return f"unknown: {unknown}" if unknown else None


def test_commands_in_sentences_are_there() -> None:
    """What is named as `fastdeploy-cache ...` between blocks is a command, and each of its options is known."""
    group: Any = typer.main.get_command(app)
    broken, num_mentions = [], 0
    for page, span in mentions():
        if not span.startswith(f"{OURS} "):
            continue
        num_mentions += 1
        words = split_commands(span)[0][1:]
        at = group
        while words and hasattr(at, "commands") and words[0] in at.commands:
            at, words = at.commands[words[0]], words[1:]
        options = {option for each in at.params for option in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
        if at.name in ("start", "up"):  # the others go on to `serve`
            options |= {option for each in group.commands["serve"].params for option in each.opts}
        if at is group and words[0] not in options | {"..."}:
            broken.append((page, span))
        broken += [(page, span) for word in words if word.startswith("-") and word.partition("=")[0] not in options]
    assert not broken
    assert num_mentions > 40


def test_each_script_in_sentences_is_there() -> None:
    """What is named as `./launch/NAME.sh ...` between blocks can be called so."""
    named = [split_commands(span)[0] for _, span in mentions() if re.match(r"\./launch/\w+\.sh\b", span)]
    assert named
    assert not [(words, error) for words in named if (error := not_taken(words[0], list(words[1:])))]


def is_run(command: Command) -> bool:
    given = " ".join(command.words[1:])
    return command.words[0] == OURS and given.startswith(RUN) and not command.block.reason


def test_each_command_is_run_or_has_a_reason() -> None:
    """A reason is of the page, for a whole block, or of the table above; none there is without a use."""
    rest = [" ".join(command.words) for command in COMMANDS if not is_run(command) and not command.block.reason]
    assert not [line for line in rest if not line.startswith(tuple(NOT_RUN))]
    files = re.findall(r"tests/\w+/test_\w+\.py", " ".join(NOT_RUN.values()))
    assert not [file for file in files if not (ROOT / file).exists()]
    named = [*rest, *(span for _, span in mentions())]
    assert not [start for start in NOT_RUN if not any(line.startswith(start) for line in named)]


RUNNABLE = [command for command in COMMANDS if is_run(command)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that pages speak of: their traces, and the settings that they show."""
    [maker] = [block for block in WHOLE if 'open("trace.jsonl", "w")' in block.text]
    subprocess.run([sys.executable, "-c", maker.text], cwd=tmp_path, timeout=60, check=True)
    lines = [{"timestamp": 10 * n, "input_length": 1000, "hash_ids": [n % 7, 7 + n % 7]} for n in range(50)]
    with gzip.open(tmp_path / "trace.jsonl.gz", "wt") as trace:
        trace.writelines(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "cache.toml").write_text(next(b.text for b in TOML if b.page == "docs/configuration.md"))
    return tmp_path


@pytest.mark.processes
@pytest.mark.parametrize("command", RUNNABLE, ids=[f"{c.block.name} {' '.join(c.words[1:3])}" for c in RUNNABLE])
def test_a_cheap_command_runs(command: Command, folder: Path) -> None:
    """It succeeds, and prints what the page shows, if it shows anything."""
    line = [sys.executable, "-m", "fastdeploy_cache.launch", *command.words[1:]]
    environment = os.environ | {"COLUMNS": "120"}
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    if command.printed is not None:
        shown = [each.rstrip() for each in command.printed.splitlines() if each.strip()]
        assert [each.rstrip() for each in done.stdout.splitlines() if each.strip()] == shown
