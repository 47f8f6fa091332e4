"""What the cache has to know of a request of vLLM's shape: tokens, images, and what its prefixes are found under."""

from __future__ import annotations

import json
from typing import Any, Protocol

from fastdeploy_cache.books.tokens import PackedTokens, TokenIds
from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.request import Request


class EngineRequest(Protocol):
    """What is read of an engine's request; also, where it has them, `all_token_ids`, `cache_salt`, `lora_request` or
    `lora_name`, `mm_features` or `mm_positions` and `mm_hashes`, `num_preemptions`, `skip_reading_prefix_cache`."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> TokenIds | None: ...
    @property
    def num_computed_tokens(self) -> int: ...


def namespace_of(*, cache_salt: str | None = None, lora_name: str | None = None, **others: str | None) -> str:
    """What prefixes of such a request are found under: "" with nothing given.

    Each part is tagged: a LoRA adapter that is named like another request's salt shares nothing with it.

    Raises:
        RequestError: a part that is no text.
    """
    parts = {"salt": cache_salt, "lora": lora_name, **others}
    parts = {name: part for name, part in parts.items() if part}
    for name, part in parts.items():
        if not isinstance(part, str):
            raise RequestError(f"{name} of a request is {part!r}; give text")
    return json.dumps(parts, sort_keys=True) if parts else ""


def native_request(request: EngineRequest, known: Request | None = None) -> Request:
    """The same request for the cache. Given that it is `known` already, another one under a namespace of its own.

    Raises:
        RequestError: no prompt tokens, or something in them that cannot be.
    """
    if request.prompt_token_ids is None:
        raise RequestError(f"request {request.request_id!r} has no prompt_token_ids; embeddings alone are not cached")
    lora = getattr(request, "lora_request", None)
    native = Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids if known is None else PackedTokens(known.prompt),
        namespace=namespace_of(
            cache_salt=getattr(request, "cache_salt", None),
            lora_name=getattr(request, "lora_name", None) if lora is None else lora.lora_name,
            lora_path=getattr(lora, "lora_path", None),
            alone=None if known is None else request.request_id,
        ),
        images=_images_of(request),
        match_inside_images=True,
    )
    # one that comes back from preemption was counted before
    native.counted = native.used = bool(getattr(request, "num_preemptions", 0))
    append_new_tokens(native, request)
    return native


def append_new_tokens(native: Request, request: EngineRequest) -> None:
    """What the engine's request has more."""
    tokens = getattr(request, "all_token_ids", ())
    if len(tokens) > native.num_tokens:
        native.append_output(tokens[native.num_tokens :])


def _images_of(request: EngineRequest) -> list[tuple[int, int, bytes | str]]:
    features = getattr(request, "mm_features", None)
    if features is not None:
        places, names = [f.mm_position for f in features], [f.identifier for f in features]
    else:
        places, names = getattr(request, "mm_positions", None) or [], getattr(request, "mm_hashes", None) or []
    if len(places) != len(names):
        raise RequestError(f"request {request.request_id!r} has {len(places)} mm_positions and {len(names)} mm_hashes")
    return [(*_place(place), name) for place, name in zip(places, names, strict=True)]


def _place(place: Any) -> tuple[int, int]:
    return (place["offset"], place["length"]) if isinstance(place, dict) else (place.offset, place.length)
