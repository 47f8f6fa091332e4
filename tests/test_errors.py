"""The tree of errors that users read is the one that there is."""

from __future__ import annotations

import ast
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
