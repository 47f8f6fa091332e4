"""The product as syntax trees: which class a name means, wherever it was imported from."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINKED = ("ipc", "metrics", "transfer_manager", "launch")  # they lie beside fastdeploy_cache
PACKAGES = (*LINKED, "fastdeploy_cache")
OPEN = {"Protocol", "Exception", "Enum", "IntEnum", "StrEnum", "IntFlag", "Struct", "NamedTuple", "TypedDict"}


@dataclass(frozen=True)
class SourceClass:
    """One class statement. Two are equal if they stand at the same place."""

    path: str
    name: str  # with the classes around it
    node: ast.ClassDef = field(compare=False, repr=False)

    @property
    def num_lines(self) -> int:
        return (self.node.end_lineno or 0) - self.node.lineno + 1

    @property
    def is_record(self) -> bool:
        """A dataclass, a message or a named tuple: made of fields that others may set."""
        made_by = {name_of(each) for each in self.node.decorator_list}
        return bool({"dataclass"} & made_by) or bool({"Struct", "NamedTuple"} & set(map(name_of, self.node.bases)))

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"


def name_of(node: ast.expr) -> str:
    """The last word of `a.b.Name`, `Name[int]` or `Name(...)`; empty for anything else."""
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class SourceMap:
    """Source texts by path below the repository's root."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.trees = {path: ast.parse(text) for path, text in texts.items()}
        self.classes = [each for path, tree in self.trees.items() for each in _classes(path, tree.body)]
        self._by_place = {(each.path, each.name): each for each in self.classes}
        self._imports = {path: dict(_imports(tree)) for path, tree in self.trees.items()}

    @classmethod
    def of_product(cls) -> SourceMap:
        paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
        return cls({str(path.relative_to(ROOT)): path.read_text() for path in paths})

    def find(self, path: str, expression: ast.expr) -> SourceClass | None:
        """The class of ours that an expression in this file means; None where it is another's, or no class."""
        if isinstance(expression, ast.Subscript):
            return self.find(path, expression.value)
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            return self.find(path, ast.parse(expression.value, mode="eval").body)
        if isinstance(expression, ast.BinOp):  # T | None
            return self.find(path, expression.left) or self.find(path, expression.right)
        return self._look_up(path, ast.unparse(expression))

    def _look_up(self, path: str, dotted: str) -> SourceClass | None:
        if (path, dotted) in self._by_place:
            return self._by_place[path, dotted]
        first, _, rest = dotted.partition(".")
        module, name = self._imports.get(path, {}).get(first, ("", ""))
        if not module:
            return None
        as_module = self._path(f"{module}.{name}") if name else self._path(module)
        if rest and as_module:
            return self._look_up(as_module, rest)
        home = self._path(module)
        return self._look_up(home, ".".join(filter(None, (name, rest)))) if home else None

    def _path(self, module: str) -> str:
        below = module.removeprefix("fastdeploy_cache.")
        place = (below if below.partition(".")[0] in LINKED else module).replace(".", "/")
        return next((each for each in (f"{place}.py", f"{place}/__init__.py") if each in self.trees), "")

    def bases(self, of: SourceClass) -> list[SourceClass]:
        found = (self.find(of.path, base) for base in of.node.bases)
        return [each for each in found if each is not None]

    def ancestry(self, of: SourceClass) -> set[SourceClass]:
        """The class and every base of ours."""
        return {of}.union(*(self.ancestry(base) for base in self.bases(of)))

    def may_be_derived(self, base: SourceClass) -> bool:
        """A Protocol; an exception, Enum, message or named tuple, also one of our own."""
        names = set(map(name_of, base.node.bases))
        if names & OPEN:
            return True
        known = [getattr(builtins, each, None) for each in names]
        if any(isinstance(each, type) and issubclass(each, BaseException) for each in known):
            return True
        return any("Protocol" not in map(name_of, b.node.bases) and self.may_be_derived(b) for b in self.bases(base))


def _classes(path: str, body: list[ast.stmt], outside: str = "") -> Iterator[SourceClass]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield SourceClass(path, outside + node.name, node)
            yield from _classes(path, node.body, f"{outside}{node.name}.")
        elif isinstance(node, ast.If | ast.Try | ast.FunctionDef):
            yield from _classes(path, node.body, outside)


def _imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """By the name that a file gives it: the module, and the name within that."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, (str(node.module), alias.name)) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, (alias.name, "")) for alias in node.names)
