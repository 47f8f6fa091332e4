"""What can befall a file on a disk, for tests that ask what its reader makes of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st

PAGE_BYTES = 4096
KINDS = ("flip", "cut", "zero", "append", "scribble", "empty")


class Damage(NamedTuple):
    """One misfortune; the seed says where in the file, and with which bytes."""

    kind: str
    seed: int

    def befall(self, file: Path) -> None:
        """Change the file's bytes."""
        file.write_bytes(self.applied_to(file.read_bytes()))

    def applied_to(self, data: bytes) -> bytes:
        """The bytes that are there afterwards."""
        chance = random.Random(self.seed)
        at = int(chance.random() * len(data))
        if self.kind == "append":
            return data + chance.randbytes(chance.choice((1, 48, 60, PAGE_BYTES, 20_000)))
        if self.kind == "empty" or not data:
            return b""
        if self.kind == "cut":
            return data[:at]
        changed = bytearray(data)
        if self.kind == "flip":
            changed[at] ^= 1 << chance.randrange(8)
        elif self.kind == "zero":
            start = at // PAGE_BYTES * PAGE_BYTES
            end = min(start + PAGE_BYTES, len(data))
            changed[start:end] = bytes(end - start)
        else:
            num = min(chance.choice((1, 4, 16, 100)), len(data) - at)
            changed[at : at + num] = chance.randbytes(num)
        return bytes(changed)


damages = st.builds(Damage, st.sampled_from(KINDS), st.integers(0, 2**32))


def files_below(folder: Path) -> list[Path]:
    """Every file, in an order that is the same for each copy of a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
