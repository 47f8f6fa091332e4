"""One array of a block, or of a state, in one layer: its shape, its dtype, its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastdeploy_cache.errors import LayoutError

# name -> NumPy dtype of its storage; what NumPy has no type for is stored as an unsigned integer
STORAGE_DTYPES: dict[str, str] = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "float8_e4m3": "uint8",
    "float8_e5m2": "uint8",
    "int8": "int8",
    "uint8": "uint8",
    "int4": "uint8",  # two elements a byte, packed along the last dimension
}
PER_STORED: dict[str, int] = {"int4": 2}


@dataclass(frozen=True)
class KVPart:
    """One array of a block in one layer: `shape` in elements without the block dimension, `dtype` of `STORAGE_DTYPES`.

    `token_axis` is the dimension of `shape` that counts the block's tokens; None where a part is of the whole block.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    token_axis: int | None = 0

    @property
    def storage_dtype(self) -> str:
        """The NumPy dtype that holds it."""
        return STORAGE_DTYPES[self.dtype]

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """`shape` in stored elements: packed dtypes have fewer in the last dimension."""
        return (*self.shape[:-1], self.shape[-1] // PER_STORED.get(self.dtype, 1))

    @property
    def num_bytes(self) -> int:
        """Bytes of this part for one block in one layer."""
        return math.prod(self.storage_shape) * np.dtype(self.storage_dtype).itemsize

    @property
    def num_stripes(self) -> int:
        """Pieces that lie before each other's tokens: 1 where the tokens come first; each holds all tokens in order."""
        return math.prod(self.shape[: self.token_axis]) if self.token_axis is not None else 1

    def leading_bytes(self, num_tokens: int) -> int:
        """Bytes at the front of each stripe that hold the first `num_tokens` tokens; all without a token axis."""
        stripe_bytes = self.num_bytes // self.num_stripes
        return stripe_bytes if self.token_axis is None else stripe_bytes // self.shape[self.token_axis] * num_tokens


def check_aligned(parts: Sequence[KVPart]) -> None:
    """Every item of every part has to lie at a multiple of its size, wherever blocks begin."""
    above, whole = 0, sum(part.num_bytes for part in parts)
    for part in parts:
        item_bytes = np.dtype(part.storage_dtype).itemsize
        if above % item_bytes or whole % item_bytes:
            raise LayoutError(
                f"{part.name} of {item_bytes} bytes an item begins {above} bytes into a layer of {whole}, "
                "which are no multiples of it; use a larger block_size or dimensions that are multiples of 4"
            )
        above += part.num_bytes
