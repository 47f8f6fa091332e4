"""The tree of errors that users read is the one that there is."""

from __future__ import annotations

import ast
import itertools
import re
from functools import cache
from pathlib import Path

from fastdeploy_cache import errors

ROOT = Path(__file__).parent.parent
FOLDERS = ("fastdeploy_cache", "transfer_manager", "ipc", "metrics", "launch")
CAUGHT_AGAIN = {"LinkError", "LinkMissingError"}  # each by the package that has it: no user sees one
LINE = re.compile(
    r"^(?P<branches>(?:[|] {3}| {4})*)[+]-- (?P<name>\w+)(?: \((?P<also>\w+)\))?(?P<star> \*)?", re.MULTILINE
)


@cache
def defined() -> dict[str, tuple[list[str], str]]:
    """Each subclass of `CacheError`: the names of its bases, and its module below `fastdeploy_cache`."""
    classes = dict[str, tuple[list[str], str]]()
    for file in (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removeprefix("fastdeploy_cache.")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                classes.setdefault(node.name, (bases, module))
    known = {"CacheError"}
    while more := {name for name, (bases, _) in classes.items() if known & set(bases)} - known:
        known |= more
    return {name: classes[name] for name in known - {"CacheError"}}


def drawn() -> dict[str, tuple[str, bool]]:
    """Each error of the picture: the one above it, and whether it has a star."""
    tree, above = dict[str, tuple[str, bool]](), ["CacheError"]
    for line in LINE.finditer(errors.__doc__ or ""):
        depth = len(line["branches"]) // 4 + 1
        tree[line["name"]] = above[depth - 1], bool(line["star"])
        above[depth:] = [line["name"]]
    return tree


def test_the_picture_has_every_error_below_its_base() -> None:
    """All that are raised to users, each once, where its class says; nothing that is not there."""
    wanted = {name: bases[0] for name, (bases, _) in defined().items() if name not in CAUGHT_AGAIN}
    assert {name: base for name, (base, _) in drawn().items()} == wanted


def test_numbers_and_times_are_told_as_they_are_said() -> None:
    """One of something has no plural, and no time is told as nothing."""
    nouns = ("rank", "copy", "prefix", "process", "CPU block")
    assert [errors.counted(1, noun) for noun in nouns] == [f"1 {noun}" for noun in nouns]
    assert [errors.counted(0, noun) for noun in nouns] == [
        "0 ranks",
        "0 copies",
        "0 prefixes",
        "0 processes",
        "0 CPU blocks",
    ]
    times = (0.0, 0.0004, 0.0016, 0.9996, 1.4, 2.0, 119.0, 120.0, 7200.0)
    assert [errors.duration(seconds) for seconds in times] == [
        *("1 ms", "1 ms", "2 ms", "1 second", "1 second", "2 seconds", "119 seconds"),
        *("2 minutes", "2 hours"),
    ]
    assert str(errors.OutOfBlocksError(1, 0)).startswith("1 block is missing; ")


PLURALS = r"(ranks|blocks|tokens|copies|pins|requests|seconds|minutes|hours|prefixes|objects|processes|loads)\b"
COUNTED = (
    "launch/operating",
    "launch/demo",
    "fastdeploy_cache/requests/explanation.py",
    "fastdeploy_cache/insight/doctor/doctor.py",
)
ALWAYS_MORE = {"len(CONVERSATIONS)", "_NUM_CPU_BLOCKS", "BLOCK_TOKENS", "MAX_SECONDS", "num_gpu_blocks"}


def test_texts_for_operators_count_by_one_function() -> None:
    """In what people look at most, no number that may be 1 stands before a plural that is written out."""
    files = [
        file for place in COUNTED for file in ([ROOT / place] if place[-3:] == ".py" else (ROOT / place).glob("*.py"))
    ]
    assert len(files) > 10
    found = [
        f"{file.name}:{text.lineno}: {ast.unparse(number.value)}{after.value[:20]}"
        for file in files
        for text in ast.walk(ast.parse(file.read_text()))
        if isinstance(text, ast.JoinedStr)
        for number, after in itertools.pairwise(text.values)
        if isinstance(number, ast.FormattedValue)
        and isinstance(after, ast.Constant)
        and re.match(rf" (?:(?!of )\w+ )?{PLURALS}", str(after.value))
        and ast.unparse(number.value) not in ALWAYS_MORE
    ]
    assert not found


def test_errors_without_a_star_are_in_the_leaf() -> None:
    """They can be imported from `fastdeploy_cache.errors`; the others from where the page says."""
    text = re.sub(r"\n  (?=\w)", " ", errors.__doc__ or "")
    places = {
        name: place
        for place, names in re.findall(r"^- `(\S+)`: (.*)$", text, re.MULTILINE)
        for name in names.split(", ")
    }
    for name, (_, has_star) in drawn().items():
        assert hasattr(errors, name) != has_star, name
        assert places.pop(name, "errors") == defined()[name][1]
    assert not places
