"""The blocks of code in pages, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SEPARATORS = {"&&", "||", ";", "|"}
FENCE = re.compile(r"(?:^<!-- not run: ([^\n]+) -->\n)?^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page, and the reason that the page gives for not running it, if it does."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def name(self) -> str:
        """Where it is."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """All pages with code of a user's, in an order that does not change."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks() -> list[Block]:
    """Every fenced block of these pages."""
    return [block for page in pages() for block in blocks_of(str(page.relative_to(ROOT)), page.read_text())]


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """The blocks of one page. A fragment of Python gives its reason in its first line."""
    for found in FENCE.finditer(text):
        reason, language, code = found.groups()
        fragment = re.match(r"# fragment: (.+)", code)
        reason = reason or (fragment.group(1) if fragment and language == "python" else None)
        line = text[: found.start(2)].count("\n") + 1
        yield Block(page=page, line=line, language=language, text=code, reason=reason)


def mentions() -> Iterator[tuple[str, str]]:
    """What stands in single backticks between the blocks, with its page."""
    for page in pages():
        for span in re.findall(r"`([^`]+)`", FENCE.sub("", page.read_text())):
            yield str(page.relative_to(ROOT)), " ".join(span.split())


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a block, as a shell would split it, and what the page says that it prints (None: nothing)."""

    block: Block
    words: tuple[str, ...]
    printed: str | None


def commands_of(block: Block) -> list[Command]:
    """The commands of a block of `bash`, and those behind a `$ ` in one of `console`."""
    if block.language == "bash":
        return [Command(block=block, words=words, printed=None) for words in split_commands(block.text)]
    commands = []
    for entry in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, printed = entry.partition("\n")
        commands += [Command(block=block, words=words, printed=printed) for words in split_commands(line)]
    return commands


def split_commands(text: str) -> list[tuple[str, ...]]:
    """Words of each command: comments, redirections and assignments are left out, and variables are filled in."""
    variables: dict[str, str] = {}
    result: list[tuple[str, ...]] = []
    for line in whole_lines(text):
        filled = re.sub(r"\$(\w+)", lambda found: variables.get(found.group(1), found.group()), line)
        words: list[str] = []
        lexer = shlex.shlex(filled, posix=True, punctuation_chars="|&;>")
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if word not in SEPARATORS:
                words.append(word)
                continue
            if words and (assigned := re.fullmatch(r"(\w+)=(.*)", words[0])):
                variables[assigned.group(1)] = assigned.group(2)
            elif words:
                result.append(tuple(words[: words.index(">")] if ">" in words else words))
            words = []
    return result


def whole_lines(text: str) -> Iterator[str]:
    """Lines, put together where a quotation or a backslash goes on in the next one."""
    line = ""
    for part in text.splitlines():
        line += part
        if line.endswith("\\"):
            line = line[:-1]
            continue
        try:
            shlex.split(line, comments=True)
        except ValueError:  # no closing quotation
            line += "\n"
            continue
        if line.strip():
            yield line
        line = ""
    assert not line.strip(), f"this command has no end: {line}"
