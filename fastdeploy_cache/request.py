"""One sequence of tokens that an engine serves."""

from __future__ import annotations

import hashlib
import math
import operator
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_cache.books.block_hash import TOKEN_BYTES
from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.image_keys import image_keys
from fastdeploy_cache.books.leaves.policy import SessionHint
from fastdeploy_cache.books.tokens import PackedTokens, TokenIds, pack
from fastdeploy_cache.errors import RequestError


def no_request(given: object) -> RequestError:
    """The error for something else in the place of a request."""
    return RequestError(
        f"a {type(given).__name__} was given in the place of a request; make a fastdeploy_cache.Request"
    )


def whole_number(given: Any, name: str) -> int:
    """The number, which may be NumPy's. Raises `RequestError` for what is none."""
    try:
        return operator.index(given)
    except TypeError:
        raise RequestError(f"{name} is {given!r}; give a whole number") from None


class Image(NamedTuple):
    """Tokens [offset, offset + length) of a prompt stand for something else than text: an image, audio, ..."""

    offset: int
    length: int
    hash: bytes  # names the content; two equal hashes are taken for the same content

    @property
    def end(self) -> int:
        """One past its last token."""
        return self.offset + self.length


class Request:
    """Prompt and output tokens, kept as packed little-endian int32 in `prompt` and `output`.

    The engine owns it and appends what it samples; one thread at a time. A list of 128k tokens takes a millisecond
    or less to pack, an int32 array microseconds: pack once, keep the request.
    """

    session_ended: bool
    tool_call_pending: bool
    tool_name: str
    will_go_on: float | None
    _session_hint: SessionHint | None
    __slots__ = (
        "_keep_seconds",
        "_priority",
        "_session_hint",
        "counted",
        "images",
        "is_hinted",
        "match_inside_images",
        "namespace",
        "num_prompt_tokens",
        "num_tokens",
        "output",
        "prompt",
        "request_id",
        "session_ended",
        "session_id",
        "tool_call_pending",
        "tool_name",
        "used",
        "will_go_on",
    )

    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: TokenIds | PackedTokens,
        namespace: str = "",
        images: Sequence[tuple[int, int, bytes | str]] = (),
        match_inside_images: bool = False,
        priority: float | None = None,
        keep_seconds: float | None = None,
        session_id: str = "",
    ) -> None:
        """Prefixes meet only where namespace, tokens and images are equal.

        Args:
            request_id: unique among the requests that are matched at the same time.
            prompt_token_ids: 0 to 2**31 - 1; an int32 array is the fastest. See `following` for a next turn.
            namespace: tenant salt, LoRA adapter, model revision.
            images: (offset, length, hash) of each, in order; they become part of the key of every block they overlap.
            match_inside_images: let a match end inside an image; else it ends before the image.
            priority: 0 (evict first) to 100, for the eviction policy `priority`.
            keep_seconds: how long that priority lasts after release; for the policy `pin`, how long to pin.
            session_id: names the conversation, or the run of an agent, within its namespace; see `cache.sessions`.

        Attributes that an engine may set until release, as hints to the policy `reuse`:
            session_ended: nobody will come back to this conversation.
            tool_call_pending: the next turn comes as soon as a tool has answered.
            tool_name: which tool that is; with a `session_id` alone.
            will_go_on: the chance, 0 to 1, that it goes on; anything else: nobody says.

        Raises:
            RequestError: an empty prompt, a token id out of range, no integers, an image outside the prompt.
        """
        self._check_names(request_id, namespace, session_id)
        self.request_id, self.namespace, self.session_id = request_id, namespace, session_id
        self.counted = self.used = False  # whether it is part of the hit rates, and the eviction policy has heard of it
        self.prompt, self.output = pack(request_id, prompt_token_ids), bytearray()  # the first is never moved
        self.num_tokens = self.num_prompt_tokens = len(self.prompt) // TOKEN_BYTES  # the first grows with the output
        if not self.num_prompt_tokens:
            raise RequestError(f"request {request_id!r} has an empty prompt; give it at least one token")
        self.images = tuple([self._as_image(image) for image in _as_list(request_id, images)]) if images != () else ()
        self.match_inside_images = match_inside_images
        self.is_hinted = priority is not None or keep_seconds is not None or type(self) is not Request
        self._priority = self._number("priority", priority, 100) if self.is_hinted else None
        self._keep_seconds = self._number("keep_seconds", keep_seconds, math.inf) if self.is_hinted else None
        self.session_ended = self.tool_call_pending = False
        self.tool_name, self.will_go_on, self._session_hint = "", None, None
        if self.images:
            self._check_images()

    @classmethod
    def following(
        cls,
        previous: Request,
        new_token_ids: TokenIds,
        *,
        request_id: str,
        images: Sequence[tuple[int, int, bytes | str]] = (),
        priority: float | None = None,
        keep_seconds: float | None = None,
    ) -> Request:
        """The next turn of a conversation: the tokens of `previous`, prompt and output, and new ones behind them.

        What was packed is not packed again. Namespace, session, images and `match_inside_images` are those of
        `previous`, which stays as it is; `images` are further ones, behind them, by their offsets in the whole prompt.

        Raises:
            RequestError: as `__init__` does.
        """
        return cls(
            request_id=request_id,
            prompt_token_ids=PackedTokens(previous.tokens + pack(request_id, new_token_ids)),
            namespace=previous.namespace,
            images=(*previous.images, *_as_list(request_id, images)),
            match_inside_images=previous.match_inside_images,
            priority=priority,
            keep_seconds=keep_seconds,
            session_id=previous.session_id,
        )

    @property
    def priority(self) -> float | None:
        """See `__init__`."""
        return self._priority

    @property
    def keep_seconds(self) -> float | None:
        """See `__init__`."""
        return self._keep_seconds

    @property
    def session_hint(self) -> SessionHint | None:
        """What it says of its session and of its future, in numbers; None: nothing."""
        if self._session_hint is not None or not (self.session_id or self.will_go_on is not None):
            return self._session_hint
        name, tool, chance = self.session_id, self.tool_name, self.will_go_on
        is_chance = not isinstance(chance, bool) and isinstance(chance, int | float) and 0 <= chance <= 1
        return SessionHint(
            session=session_number(self.namespace, name) if name else 0,
            going=min(4, 1 + int(4 * chance)) if is_chance and chance is not None else 0,
            tool=zlib.crc32(tool.encode(errors="replace")) if isinstance(tool, str) and tool else 0,
            num_answer_tokens=self.num_tokens - self.num_prompt_tokens,
        )

    def take_session_hint(self, hint: SessionHint | None) -> None:
        """Say what another request has said: for replays, which know no names. Its session is called by its number."""
        self._session_hint = hint
        self.session_id = f"{hint.session:x}" if hint is not None and hint.session else ""

    def token_ids(self, start: int, end: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Its tokens [start, end), prompt and output: not to be written. What lies beyond its end is left out.

        Raises:
            RequestError: `start` is below 0 or behind `end`.
        """
        if not 0 <= start <= end:
            raise RequestError(f"request {self.request_id!r}: tokens [{start}, {end}); give 0 <= start <= end")
        keys = BlockKeys(self.prompt, self.output, None)
        return np.frombuffer(keys.part(start * TOKEN_BYTES, end * TOKEN_BYTES), "<i4")

    def __repr__(self) -> str:
        """The name and the size: tokens would be a page."""
        return f"Request({self.request_id!r}, {self.num_tokens} tokens)"

    @property
    def tokens(self) -> bytes:
        """Prompt and output, packed: a copy."""
        return self.prompt + self.output

    def append_output(self, token_ids: TokenIds) -> None:
        """Append sampled tokens; all of them or, on `RequestError`, none."""
        self.append_packed(pack(self.request_id, token_ids))

    def append_packed(self, tokens: bytes | memoryview) -> None:
        """The same with tokens that `pack` has checked."""
        self.output += tokens
        self.num_tokens = self.num_prompt_tokens + len(self.output) // TOKEN_BYTES

    def cut_output(self, num_tokens: int) -> None:
        """The reverse: only so many tokens are left, those of the prompt included.

        Raises:
            RequestError: fewer than the prompt has, or more than there are; nothing was changed.
        """
        if not self.num_prompt_tokens <= num_tokens <= self.num_tokens:
            raise RequestError(
                f"cut_output of request {self.request_id!r} to {num_tokens} tokens; give {self.num_prompt_tokens}, "
                f"which are its prompt, to {self.num_tokens}, which are all that it has"
            )
        del self.output[(num_tokens - self.num_prompt_tokens) * TOKEN_BYTES :]
        self.num_tokens = num_tokens

    def keys(self, block_size: int) -> BlockKeys:
        """What its blocks are found by; what is appended to its output later is seen."""
        return BlockKeys(self.prompt, self.output, self.extra_keys(block_size) if self.images else None)

    def extra_keys(self, block_size: int) -> dict[int, bytes] | None:
        """What is part of each block's key beside its tokens: see `books.image_keys`. None where there are no images,
        whose hashes are UTF-8 where they were given as text."""
        return image_keys(self.images, block_size) if self.images else None

    def whole_images(self, num_blocks: int, block_size: int) -> int:
        """The most blocks up to `num_blocks` whose end lies inside no image, unless the request wants it there."""
        while self.images and self.ends_inside_image(num_blocks * block_size):
            num_blocks -= 1
        return num_blocks

    def ends_inside_image(self, num_tokens: int) -> bool:
        """Whether a match of so many tokens would end inside an image, and the request does not want that."""
        return not self.match_inside_images and any(image.offset < num_tokens < image.end for image in self.images)

    @staticmethod
    def _check_names(request_id: str, namespace: str, session_id: str) -> None:
        for name, text in (("request_id", request_id), ("namespace", namespace), ("session_id", session_id)):
            if not isinstance(text, str):
                raise RequestError(f"{name} of request {request_id!r} is {text!r}; give text")
        try:
            namespace.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"namespace {namespace!r} of request {request_id!r} is no UTF-8 text") from error

    def _number(self, name: str, value: float | None, most: float) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            limits = f"0 to {most:g}" if most < math.inf else "0 or more"
            raise RequestError(f"request {self.request_id!r} has {name} {value!r}; give a number, {limits}")
        return value

    def _as_image(self, given: tuple[int, int, bytes | str]) -> Image:
        try:
            offset, length, name = given
            name = name.encode() if isinstance(name, str) else name
            image = Image(operator.index(offset), operator.index(length), name)
        except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
            image = None
            reason = str(error)
        else:
            reason = "its hash is no text and no bytes"
        if image is None or not isinstance(image.hash, bytes):
            raise RequestError(
                f"request {self.request_id!r} has image {given!r}; give (offset, length, hash), hash as text or bytes: "
                f"{reason}"
            )
        return image

    def _check_images(self) -> None:
        end = 0
        for image in self.images:
            if not (end <= image.offset and image.length >= 1 and image.end <= self.num_prompt_tokens):
                raise RequestError(
                    f"request {self.request_id!r} has an image at {image.offset} of {image.length} tokens; images lie "
                    f"in the prompt of {self.num_prompt_tokens} tokens, in order, and do not overlap"
                )
            end = image.end


def session_number(namespace: str, session_id: str) -> int:
    """Names a session within its namespace, in 63 bits; never 0."""
    name = len(namespace).to_bytes(8, "little") + f"{namespace}{session_id}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1 | 1


def _as_list(request_id: str, images: Sequence[tuple[int, int, bytes | str]]) -> list[tuple[int, int, bytes | str]]:
    try:
        return list(images)
    except TypeError:
        raise RequestError(
            f"request {request_id!r} has images {images!r}; give a list of (offset, length, hash)"
        ) from None
