"""Where the product departs from its shape: each function finds one kind of fault, by place and name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.rigs.source_map import SourceClass, SourceMap, name_of

MAX_CLASS_LINES, MAX_COLUMNS = 350, 120
# No English sentence begins with these, or only in an order that English hardly has.
NEVER_FIRST = re.compile("Of|As|By|Per|To|From|Until|Nor|And|Or|But|Also|Then|Than|Though")
# These may begin a clause that a comma ends: "While it is paused, nothing starts."
BEFORE_A_COMMA = re.compile(
    "For|With|Without|Under|Over|In|On|At|After|Before|While|Within|Behind|Between|Below|Above|Through|Against|Beside"
    "|Among|Since|Into|During"
)
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def inheritance(product: SourceMap, permitted: set[str]) -> set[str]:
    """Classes that derive from a class of ours, unless it is open to that or `permitted`, by its name."""
    return {
        f"{each}({base.name})"
        for each in product.classes
        for base in product.bases(each)
        if not product.may_be_derived(base) and str(base) not in permitted
    }


def not_implemented(product: SourceMap) -> set[str]:
    """Functions that raise `NotImplementedError`."""
    return {
        f"{path}: {name}"
        for path, tree in product.trees.items()
        for name, definition in _definitions(tree.body)
        if not isinstance(definition, ast.ClassDef)
        for node in ast.walk(definition)
        if isinstance(node, ast.Raise) and node.exc is not None and name_of(node.exc) == "NotImplementedError"
    }


def long_classes(product: SourceMap) -> set[str]:
    """Classes that have too many lines, those of their bases counted."""
    return {
        str(each)
        for each in product.classes
        if sum(part.num_lines for part in product.ancestry(each)) > MAX_CLASS_LINES
    }


def rewired(product: SourceMap) -> set[str]:
    """Assignments `self.x.y = ...`, but for those to a record, or to an object of the same room."""
    found = set()
    for each in product.classes:
        kinds = {name: kind for name, kind in _kinds_of_fields(product, each) if kind is not None}
        for target in _targets(each.node):
            match target:
                case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                    kind = kinds.get(name)
                    if kind is None or not (kind.is_record or room_of(kind.path) == room_of(each.path)):
                        found.add(f"{each}: {ast.unparse(target)}")
    return found


def room_of(path: str) -> str:
    """The folder that a file lies in; a file directly in a package is a room of its own."""
    folder, _, _ = path.rpartition("/")
    return folder if "/" in folder else path


def broken_docstrings(product: SourceMap) -> set[str]:
    """Docstrings that begin in the middle of a sentence."""
    return {
        f"{path}: {name}"
        for path, tree in product.trees.items()
        for name, node in [("the module", tree), *_definitions(tree.body)]
        if begins_in_the_middle(ast.get_docstring(node) or "")
    }


def begins_in_the_middle(docstring: str) -> bool:
    first = (docstring.split() or [""])[0]
    if re.fullmatch(r"[a-z][a-z']*[,.:;]?", first):  # all lower case: no name such as `vLLM` or `page_size`
        return True
    sentence = re.split(r"[.:;](?:\s|$)", docstring, maxsplit=1)[0]
    word = first.strip(",.:;")
    return bool(NEVER_FIRST.fullmatch(word) or (BEFORE_A_COMMA.fullmatch(word) and "," not in sentence))


def wide_pages(pages: dict[str, str]) -> set[str]:
    """Pages that have a line of too many columns."""
    return {name for name, text in pages.items() if max(map(len, text.splitlines()), default=0) > MAX_COLUMNS}


def _definitions(body: list[ast.stmt], outside: str = "") -> Iterator[tuple[str, Definition]]:
    for node in body:
        if isinstance(node, Definition):
            yield outside + node.name, node
            yield from _definitions(node.body, f"{outside}{node.name}.")


def _targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """Every attribute that is assigned, augmented or deleted below this node."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store | ast.Del):
            yield each


def _kinds_of_fields(product: SourceMap, of: SourceClass) -> Iterator[tuple[str, SourceClass | None]]:
    """The classes of the fields, as far as annotations, parameters and constructors tell them; those of bases, too."""
    for part in product.ancestry(of):
        yield from ((name, product.find(part.path, kind)) for name, kind in _declared(part.node))


def _declared(of: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for each in of.body:
        if isinstance(each, ast.AnnAssign):
            yield name_of(each.target), each.annotation
        elif isinstance(each, ast.FunctionDef):
            if each.returns is not None and "property" in map(name_of, each.decorator_list):
                yield each.name, each.returns
            given = {arg.arg: arg.annotation for arg in [*each.args.args, *each.args.kwonlyargs]}
            for node in ast.walk(each):
                match node:
                    case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                        yield name, node.annotation
                    case ast.Assign(value=value):
                        yield from _kinds_of_assigned(node.targets[0], value, given)


def _kinds_of_assigned(
    target: ast.expr, value: ast.expr, given: dict[str, ast.expr | None]
) -> Iterator[tuple[str, ast.expr]]:
    match target, value:
        case ast.Tuple(elts=targets), ast.Tuple(elts=values):
            for each, one in zip(targets, values, strict=False):
                yield from _kinds_of_assigned(each, one, given)
        case ast.Attribute(value=ast.Name(id="self"), attr=name), ast.Name(id=parameter):
            kind = given.get(parameter)
            if kind is not None:
                yield name, kind
        case ast.Attribute(value=ast.Name(id="self"), attr=name), ast.Call(func=function):
            yield name, function
