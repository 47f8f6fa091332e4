"""Each program in examples/ runs as a reader would run it and prints what it is there to show."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.pages import blocks

ROOT = Path(__file__).parent.parent
EXAMPLES = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
PRINTS = {
    "toy_engine": [
        "a question: of 200 tokens 0 from GPU, 0 from CPU, 0 from disk",
        "the same again: of 200 tokens 192 from GPU, 0 from CPU, 0 from disk",
        "its second turn: of 264 tokens 208 from GPU, 0 from CPU, 0 from disk",
        "something long: of 320 tokens 0 from GPU, 0 from CPU, 0 from disk",
        "its third turn: of 328 tokens 160 from GPU, 112 from CPU, 0 from disk",
        "its fourth turn: of 392 tokens 0 from GPU, 0 from CPU, 336 from disk",
    ],
    "worker_owns_kv": [
        "first request: 0 tokens from GPU, 0 from CPU; each key is right",
        "second request: 192 tokens from GPU, 0 from CPU; each key is right",
        "the worker was killed, and its arrays have gone with it",
        "third request: 0 tokens from GPU, 192 from CPU; each key is right",
    ],
    "ahead_of_loads": [
        "992 are or come",
        *(f"layer {layer}: in after N ms" for layer in range(8)),
        "the step counts: True",
    ],
    "giving_way": [
        *(f"{name} runs: 0 of 12 tokens were cached" for name in "abcd"),
        "d gives way; new tokens so far: 1",
        "d runs: 12 of 13 tokens were cached",
        "d gives way; new tokens so far: 5",
        "c gives way; new tokens so far: 5",
        "c runs: 16 of 17 tokens were cached",
        "c gives way; new tokens so far: 9",
        "c runs: 16 of 21 tokens were cached",
        "d runs: 8 of 17 tokens were cached",
        "e runs: 8 of 12 tokens were cached",
        "f runs: 8 of 12 tokens were cached",
        "6 answers are those that the model gives alone",
    ],
    "hybrid_engine": [
        "a question: 0 of 30 tokens were cached",
        "the same again: 28 of 30 tokens were cached",
        "its second turn: 28 of 50 tokens were cached",
        "one that parts from it: 0 of 27 tokens were cached",
        "another one that does: 16 of 26 tokens were cached",
    ],
    "prefill_decode": [
        "turn 1: decode has 96 of 100 tokens, and computes the rest",
        "turn 2: decode has 192 of 200 tokens, and computes the rest",
    ],
    "own_store": [
        "the first engine read 0 tokens",
        "the second engine read 192 tokens",
        "after damage to every file the third engine read 0 tokens",
    ],
}


def python_blocks() -> Iterator[tuple[str, str]]:
    """Each with its page; those of a page that is a program, one below the other, are one."""
    program = ""
    for block in blocks():
        if block.page == "docs/embed.md":
            program += block.text if block.language == "python" else ""
        elif block.language == "python":
            yield block.page, block.text
    yield "docs/embed.md", program


def undefined_names(code: str) -> set[str]:
    """The global names that a program reads and nowhere sets."""
    tables, asked, given = [symtable.symtable(code, "block", "exec")], set[str](), set(dir(builtins)) | {"__name__"}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        asked |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
        given |= {s.get_name() for s in table.get_symbols() if top and (s.is_assigned() or s.is_imported())}
    return asked - given


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(PRINTS))
def test_an_example_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    """From another folder, with nothing but this package and NumPy; but for what time decides, each line is as here."""
    command = [sys.executable, str(EXAMPLES[name])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [_without_time(line) for line in done.stdout.splitlines()] == PRINTS[name]
    assert not list(tmp_path.iterdir())


def _without_time(line: str) -> str:
    """Milliseconds, and how much of a load has come already, differ from run to run."""
    there = re.fullmatch(r"(\d+) tokens are there, (\d+) are on their way", line)
    return f"{int(there[1]) + int(there[2])} are or come" if there else re.sub(r"[\d.]+ ms", "N ms", line)


def test_each_example_is_tried_and_linked() -> None:
    """Each is run here, begins with what it shows, is short, and docs/engine.md leads to it."""
    assert EXAMPLES.keys() == PRINTS.keys()
    page = (ROOT / "docs/engine.md").read_text()
    for name, path in EXAMPLES.items():
        text = path.read_text()
        assert f"`python examples/{name}.py" in str(ast.get_docstring(ast.parse(text))), name
        assert len(text.splitlines()) <= 120, name
        assert f"(../examples/{name}.py)" in page, name
        libraries = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)) - sys.stdlib_module_names
        assert libraries <= {"numpy", "fastdeploy_cache"}, name
    assert "(examples)" in (ROOT / "README.md").read_text()


def test_the_page_on_embedding_is_the_first_example() -> None:
    """Its code is the program without its docstring, and its texts are what that prints."""
    program = EXAMPLES["toy_engine"].read_text().partition('"""\n\n')[2]
    of_the_page = [block for block in blocks() if block.page == "docs/embed.md"]
    shown = "".join(block.text for block in of_the_page if block.language == "python")
    assert list(filter(None, shown.splitlines())) == list(filter(None, program.splitlines()))
    printed = "".join(block.text for block in of_the_page if block.language == "text")
    assert printed.splitlines() == PRINTS["toy_engine"]


def test_code_in_pages_is_whole_or_says_that_it_is_a_fragment() -> None:
    """A block of Python in a page sets each name that it reads, or begins with the comment `# fragment: ...`."""
    codes = list(python_blocks())
    whole = [(page, code) for page, code in codes if not code.startswith("# fragment: ")]
    assert not [(page, names, code) for page, code in whole if (names := undefined_names(code))]
    assert all(undefined_names(code) for page, code in codes if (page, code) not in whole), "it is no fragment"


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("cache.match(request)", {"cache", "request"}),
        ("import numpy as np\nfor i in range(3):\n    print(np.ones(i))", set()),
        ("class A:\n    b = 1\n    def c(self, d):\n        return [e for e in d] + [b]", {"b"}),
    ],
)
def test_planted_fragments_are_found(code: str, names: set[str]) -> None:
    """A name that is read and not set is found, in functions too; arguments, imports and built-ins are let pass."""
    assert undefined_names(code) == names
