"""Figures of the code's shape, read off its files: what `tests/test_ratchets.py` holds."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CORE = ROOT / "fastdeploy_cache"
_CLOCKS = {"time", "random", "secrets", "uuid", "sched"}
_WAYS = {("threading", "Timer"), ("threading", "Event"), ("os", "urandom"), ("random", "default_rng")}


def num_entries(package: str) -> int:
    """Files and folders directly in a package, links apart: what a reader meets first."""
    return sum(1 for path in (ROOT / package).iterdir() if _counts(path))


def _counts(path: Path) -> bool:
    if path.is_symlink() or path.name == "__pycache__":
        return False
    return path.is_dir() or path.suffix in {".py", ".pyi", ".c", ".sh", ".toml"}


def num_lines(folder: Path) -> int:
    """Of Python, in all files below."""
    paths = [folder] if folder.is_file() else folder.rglob("*.py")
    return sum(len(path.read_text().splitlines()) for path in paths)


def lines_of_rooms() -> dict[str, int]:
    """Of each room of the core."""
    rooms = [path for path in CORE.iterdir() if _counts(path) and path.suffix in {"", ".py"}]
    return {path.stem: num_lines(path) for path in rooms}


@cache
def room_pairs() -> frozenset[tuple[str, str]]:
    """Each room of the core, and each other that it imports."""
    pairs = set()
    rooms = lines_of_rooms().keys()
    for path in CORE.rglob("*.py"):
        room = path.relative_to(CORE).with_suffix("").parts[0]
        for module in _imported(path):
            other = module.removeprefix("fastdeploy_cache.").partition(".")[0]
            if module.startswith("fastdeploy_cache.") and other in rooms and other != room != "__init__":
                pairs.add((room, other))
    return frozenset(pairs)


def longest_chain(pairs: Iterable[tuple[str, str]]) -> int:
    """The most rooms of which each imports the next; a circle is gone through once."""
    below: dict[str, set[str]] = {}
    for room, other in pairs:
        below.setdefault(room, set()).add(other)

    @cache
    def from_room(room: str, seen: frozenset[str]) -> int:
        others = below.get(room, set()) - seen
        return 1 + max((from_room(other, seen | {other}) for other in others), default=0)

    return max(from_room(room, frozenset({room})) for room in below)


def modules_with_a_clock(*folders: str) -> set[str]:
    """Modules that read time, make timers or events, draw lots, or ask for Python's own hash by themselves."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        if _imported(path) & _CLOCKS or any(map(_is_own_way, ast.walk(ast.parse(path.read_text())))):
            found.add(str(path.relative_to(ROOT)))
    return found


def _is_own_way(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "hash" and ast.unparse(node.args[0]) != "self.name"
    name, of = getattr(node.func, "attr", ""), getattr(node.func, "value", None)
    of_name = getattr(of, "id", None) or getattr(of, "attr", "")
    return (of_name, name) in _WAYS and not (name == "default_rng" and node.args)


def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def class_of(path: Path, name: str) -> ast.ClassDef:
    """A class's definition."""
    tree = ast.parse(path.read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def num_class_lines(path: Path, name: str) -> int:
    """From its head to its last line."""
    found = class_of(path, name)
    return (found.end_lineno or found.lineno) - found.lineno + 1


def fields_of(path: Path, name: str) -> list[str]:
    """What is annotated in a class."""
    return [str(node.target.id) for node in class_of(path, name).body if _is_field(node)]  # type: ignore[attr-defined]


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def public_names(path: Path, name: str) -> set[str]:
    """Methods, properties, and what `__init__` sets, as far as users may name them."""
    found: set[str] = set(fields_of(path, name))
    for node in class_of(path, name).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
            if node.name == "__init__":
                found |= {attribute.attr for attribute in ast.walk(node) if _is_set(attribute)}  # type: ignore[attr-defined]
    return {each for each in found if not each.startswith("_")}


def _is_set(node: ast.AST) -> bool:
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return is_own and isinstance(node.ctx, ast.Store)  # type: ignore[attr-defined]
