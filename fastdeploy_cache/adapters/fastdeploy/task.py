"""FastDeploy's requests, by the attributes that its cache manager reads, as requests of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import numpy as np

from fastdeploy_cache.adapters.repeated_lists import RepeatedLists
from fastdeploy_cache.books.block_hash import BlockHasher, root_hash
from fastdeploy_cache.errors import OutOfBlocksError, RequestError, UnknownRequestError
from fastdeploy_cache.request import Request


class Task(Protocol):
    """What is read of a request; `multimodal_inputs` and the attributes after it may be missing.

    Attributes:
        request_id: names it.
        prompt_token_ids, output_token_ids: lists or arrays of token ids.
        block_tables: the ids of its blocks, first to last; the engine keeps it.
        num_cached_blocks: written here: its first blocks, which are the cache's to free.
        multimodal_inputs: a mapping with `mm_positions` (each with `.offset` and `.length`) and `mm_hashes`.
        namespace: prefixes of different ones never meet.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | np.ndarray[Any, Any]: ...


class NotEnoughBlocksError(OutOfBlocksError, AssertionError):
    """No room; nothing was changed. Theirs is an AssertionError, too."""


class UnknownTaskError(UnknownRequestError, KeyError):
    """The task holds nothing here: it was never matched, or was released."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


@dataclass(eq=False)
class HeldTask:
    """A task that was matched and not released.

    `request` has its prompt as it was matched, and its output as far as it is known here: schedulers cut and overwrite
    `task.prompt_token_ids` afterwards.
    """

    task: Task
    request: Request
    with_path: bool  # of the v0 sequence: its blocks were all allocated at once
    num_handed_blocks: int = 0  # of its block table, those that are the cache's
    num_committed_blocks: int = 0  # of these, what others can find
    num_path_blocks: int = 2**31  # all that a v0 task has
    num_updated_tokens: int = 0  # of a v1 task, as far as `update_cache_blocks` has said
    num_marked_tokens: int | None = None  # computed, as far as the engine has said
    num_shown_tokens: int = 0  # findable because the task has said a token
    unfilled_ids: tuple[int, ...] = ()  # of the v0 sequence: blocks behind its full ones
    lock: Lock = field(default_factory=Lock)  # its request's tokens grow, or are read for another task's match

    def __post_init__(self) -> None:
        self._num_outputs_before = self._num_outputs = self.request.num_tokens - self.request.num_prompt_tokens

    @property
    def num_proven_tokens(self) -> int:
        """Computed for certain: where it has said a token since its match, all before the last one. Else none."""
        num_outputs = len(outputs_of(self.task))
        return self.request.num_prompt_tokens + num_outputs - 1 if num_outputs > self._num_outputs_before else 0

    def follow_outputs(self) -> None:
        """Append what the task has said since; a request of ours only grows.

        Raises:
            RequestError: no token id; nothing was appended.
        """
        if len(new := outputs_of(self.task)[self._num_outputs :]):
            with self.lock:
                self.request.append_output(new)
            self._num_outputs += len(new)


def new_request(task: Task, repeated: RepeatedLists | None = None) -> Request:
    """A request with the task's tokens so far, prompt and output. `repeated` packs a prompt once that comes often."""
    prompt = task.prompt_token_ids
    if prompt is None or not len(prompt):
        raise RequestError(f"request {task.request_id!r} has no tokens; give it prompt_token_ids")
    packed = repeated.packed(str(task.request_id), prompt) if repeated is not None else None
    request = Request(
        request_id=str(task.request_id),
        prompt_token_ids=prompt if packed is None else packed,
        namespace=str(getattr(task, "namespace", "") or ""),
        images=images_of(task, len(prompt)),
    )
    if len(outputs := outputs_of(task)):  # it comes back from a preemption: it was counted, and is used, already
        request.append_output(outputs)
        request.counted = request.used = True
    return request


def outputs_of(task: Task) -> Sequence[int] | np.ndarray[Any, Any]:
    """Its output tokens; none where it has no such list."""
    outputs = getattr(task, "output_token_ids", None)
    return outputs if outputs is not None else ()


def images_of(task: Task, num_tokens: int) -> list[tuple[int, int, str]]:
    """(offset, length, hash) of each image in its first `num_tokens` tokens."""
    inputs = getattr(task, "multimodal_inputs", None) or {}
    positions, hashes = _field(inputs, "mm_positions"), _field(inputs, "mm_hashes")
    if len(positions) != len(hashes):
        raise RequestError(f"request {task.request_id!r} has {len(positions)} mm_positions and {len(hashes)} mm_hashes")
    images = [(int(p.offset), int(p.length), str(h)) for p, h in zip(positions, hashes, strict=True)]
    # one that the tokens end in counts with what they have of it
    return [(offset, min(length, num_tokens - offset), name) for offset, length, name in images if offset < num_tokens]


def _field(inputs: Any, name: str) -> Sequence[Any]:
    value = inputs.get(name) if isinstance(inputs, Mapping) else getattr(inputs, name, None)
    return value if value is not None else ()


def block_hash_extra_keys(request: Task, start_idx: int, end_idx: int, mm_idx: int) -> tuple[int, list[str]]:
    """The index of the image to look from next, and the hashes of the images that overlap tokens [start_idx, end_idx);
    images before `mm_idx` are not looked at.

    That index is of the first image that reaches behind `end_idx`, else of the last one. Where all images end before
    `start_idx` it is `mm_idx`.
    """
    inputs = getattr(request, "multimodal_inputs", None) or {}
    positions, hashes = _field(inputs, "mm_positions"), _field(inputs, "mm_hashes")
    found: list[str] = []
    if not len(positions) or positions[-1].offset + positions[-1].length <= start_idx:
        return mm_idx, found
    for index in range(mm_idx, len(positions)):
        first, last = positions[index].offset, positions[index].offset + positions[index].length
        if first < end_idx and last > start_idx:
            found.append(hashes[index])
        if last > end_idx:
            return index, found
    return len(positions) - 1, found


def is_inside_image(mm_inputs: Any, matched_token_num: int) -> tuple[bool, int]:
    """Whether so many tokens end inside an image, and the index of that image; 0 where they do not."""
    for index, position in enumerate(_field(mm_inputs or {}, "mm_positions")):
        if position.offset < matched_token_num < position.offset + position.length:
            return True, index
    return False, 0


def path_hashes(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
    """The hashes of its first blocks."""
    root = root_hash(request.namespace, block_size)
    joined = BlockHasher(block_size).extend(root, request.tokens, 0, num_blocks, request.extra_keys(block_size))
    return [joined[i : i + len(root)] for i in range(0, len(joined), len(root))]
