"""The shape of classes and words: what may be derived, raised, rewired and written."""

from __future__ import annotations

import pytest

from tests.rigs import shape_debts as debts
from tests.rigs import shape_faults as faults
from tests.rigs.source_map import ROOT, SourceMap

# Classes of ours that are made to be derived from, though they are none of the open kinds.
PERMITTED_BASES = {
    "fastdeploy_cache/books/changes.py: Change",  # a record
    "fastdeploy_cache/books/run.py: Pin",  # a segment is one that also names what comes
    "fastdeploy_cache/callers/transfers.py: CallerTransfer",
    "fastdeploy_cache/peers/transfers.py: PeerTransfer",
    "transfer_manager/peer/link.py: Peer",  # each link adds what its library needs
    "fastdeploy_cache/books/leaves/policy.py: LeastRecentlyUsed",  # a policy differs from it in how it ranks
    "fastdeploy_cache/policies/eviction.py: _ForATime",
}
# Objects of other rooms, or of others than us, whose fields are theirs to be set.
SET_FROM_OUTSIDE = {
    "fastdeploy_cache/adapters/fastdeploy/current_cache.py: CurrentCache: self.their_config.cache_config",  # theirs
    "transfer_manager/device/cuda_driver.py: Cuda: self._attributes.srcAccessOrder",  # a structure of NVIDIA's
    "launch/bench/report.py: Report: self._console.width",  # rich's own way
}


@pytest.fixture(scope="module")
def product() -> SourceMap:
    return SourceMap.of_product()


def planted(text: str, path: str = "fastdeploy_cache/requests/planted.py") -> SourceMap:
    other = "class Other:\n    pass\n\n@dataclass\nclass Record:\n    field: int\n"
    return SourceMap({"fastdeploy_cache/books/other.py": other, path: text})


def test_composed_not_inherited(product: SourceMap) -> None:
    """No class derives from a class of ours but Protocols, exceptions, Enums, messages, named tuples and a written
    list."""
    assert faults.inheritance(product, PERMITTED_BASES) == debts.INHERITANCE
    bases = {str(base) for each in product.classes for base in product.bases(each)}
    assert bases >= PERMITTED_BASES, "nothing derives from it: take it off the list"


def test_nothing_is_left_for_a_subclass_to_write(product: SourceMap) -> None:
    """No function of the product raises `NotImplementedError`."""
    assert faults.not_implemented(product) == debts.NOT_IMPLEMENTED


def test_a_class_can_be_read_at_one_sitting(product: SourceMap) -> None:
    """No class is over 350 lines, those of its bases counted."""
    assert faults.long_classes(product) == debts.LONG_CLASSES


def test_nobody_rewires_an_object_of_another_room(product: SourceMap) -> None:
    """No `self.x.y = ...`, but where x is a record (a dataclass, a message, a named tuple), an object of the same room,
    or on the written list."""
    found = faults.rewired(product)
    assert found - SET_FROM_OUTSIDE == debts.REWIRED
    assert found >= SET_FROM_OUTSIDE, "it is not set any more: take it off the list"


def test_docstrings_begin_at_the_beginning(product: SourceMap) -> None:
    """No docstring begins with a lower-case word or in the middle of a sentence ("Of an offer.")."""
    assert faults.broken_docstrings(product) == debts.DOCSTRINGS


def test_pages_are_as_wide_as_the_code() -> None:
    """No line of a Markdown page, a script or a model is over 120 columns."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".ci").iterdir()]
    pages += [*(ROOT / "launch").rglob("*.sh"), *(ROOT / "tests" / "model").glob("*.pml")]
    assert faults.wide_pages({str(page.relative_to(ROOT)): page.read_text() for page in pages}) == debts.WIDE_PAGES


FROM_OTHER = "from fastdeploy_cache.books.other import Other, Record\n"
SETS = (
    "class New:\n    def __init__(self, given: {}) -> None:\n        self.given = given\n        self.given.field{}\n"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class Base:\n    pass\n\nclass New(Base):\n    pass", {"New(Base)"}),
        (f"{FROM_OTHER}class New(Other):\n    pass", {"New(Other)"}),
        ("from fastdeploy_cache.books import other\nclass New(other.Other):\n    pass", {"New(Other)"}),
        ("class P(Protocol):\n    pass\n\nclass A(P):\n    pass\n\nclass B(A):\n    pass", {"B(A)"}),
        ("class E(ValueError):\n    pass\n\nclass F(E):\n    pass\n\nclass G(F):\n    pass", set()),
        ("class M(msgspec.Struct):\n    pass\n\nclass N(M):\n    pass", set()),
    ],
)
def test_planted_inheritance_is_found(text: str, found: set[str]) -> None:
    """A base of ours is found in this file and through imports; the open kinds are let pass."""
    path = "fastdeploy_cache/requests/planted.py"
    assert faults.inheritance(planted(text, path), set()) == {f"{path}: {name}" for name in found}


@pytest.mark.parametrize(
    ("kind", "what", "is_found"),
    [
        ("Other", " = 1", True),
        ("Other | None", " += 1", True),
        ("Unknown", " = 1", True),
        ('"Other"', ", self.mine = 1, 2", True),
        ("Record", " = 1", False),
        ("New", " = 1", False),
    ],
)
def test_planted_rewiring_is_found(kind: str, what: str, is_found: bool) -> None:
    """Another room's object is found, also in a tuple and augmented; a record and an object of the room are let
    pass."""
    found = faults.rewired(planted(FROM_OTHER + SETS.format(kind, what)))
    assert found == ({"fastdeploy_cache/requests/planted.py: New: self.given.field"} if is_found else set())


def test_planted_length_and_unwritten_functions_are_found() -> None:
    """A class is as long as it and its bases are."""
    long = planted("class A:\n" + "    a = 1\n" * 200 + "\nclass B(A):\n" + "    b = 1\n" * 149)
    assert faults.long_classes(long) == {"fastdeploy_cache/requests/planted.py: B"}
    unwritten = planted("class A:\n    async def verb(self) -> None:\n        raise NotImplementedError('verb')")
    assert faults.not_implemented(unwritten) == {"fastdeploy_cache/requests/planted.py: A.verb"}


@pytest.mark.parametrize(
    ("docstring", "is_broken"),
    [
        ("Of an offer, or a receive.", True),
        ("the next one.", True),
        ("Under the lock.", True),
        ("Under the lock: a task, or none, has ended.", True),
        ("While it is paused, nothing starts.", False),
        ("vLLM's block pool.", False),
        ("page_size tokens.", False),
        ("The next one.", False),
        ("", False),
    ],
)
def test_planted_docstrings_are_found(docstring: str, is_broken: bool) -> None:
    """A lower-case word and a leading preposition are found; a leading clause and a name are let pass."""
    text = f'class New:\n    """{docstring}"""\n'
    found = faults.broken_docstrings(planted(text))
    assert found == ({"fastdeploy_cache/requests/planted.py: New"} if is_broken else set())
    assert faults.wide_pages({"a.md": docstring + "x" * 120, "b.md": "x" * 120}) == ({"a.md"} if docstring else set())
