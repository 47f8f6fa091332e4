"""What each instance has cached of a prompt, as its events tell a router."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import CacheError, LaunchError
from fastdeploy_cache.events import Mirror, PrefixFound
from fastdeploy_cache.events.wire import MEDIA
from fastdeploy_cache.launch.server.api_fields import RefusedFieldError
from fastdeploy_cache.launch.server.api_prompts import PromptReader
from fastdeploy_cache.launch.server.api_requests import KINDS, ApiRequest, decode_request
from fastdeploy_cache.launch.server.instances import place_of
from fastdeploy_cache.launch.server.upstream import Place

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 5.0  # until a mirror that has ended is made anew
_MOST_TOKENS = 131_072  # of a prompt that is looked for; its instance may refuse it anyway


@dataclass(frozen=True)
class PromptKnown:
    """What is known of the prompts of a request; their tokens are summed up.

    Attributes:
        num_tokens: how many they have.
        num_prompts: how many they are.
        found: what is cached of them, by instance. Of one that is not in it nothing is known at the moment.
    """

    num_tokens: int
    found: Mapping[Place, PrefixFound] = field(default_factory=dict)
    num_prompts: int = 1


@dataclass(frozen=True)
class InstanceState:
    """How well it is known what an instance has.

    Attributes:
        is_current: whether its events are all here.
        num_blocks: by medium.
        failure: why nobody listens, for the moment.
    """

    is_current: bool
    num_blocks: Mapping[str, int]
    failure: str | None


class EventSource:
    """An instance and where it publishes, as an option says it: URL,ENDPOINT or URL,ENDPOINT,KEY."""

    def __init__(self, text: str, option: str = "--events") -> None:
        """Raises `LaunchError` for what says none."""
        words = text.split(",")
        if len(words) not in (2, 3) or not all(words):
            raise LaunchError(
                f"{option} {text!r} names no instance with its events; use URL,ENDPOINT such as "
                "http://127.0.0.1:8001,tcp://127.0.0.1:5557, and behind another comma the publisher's key if it has one"
            )
        self.place, self.endpoint, self.key = place_of(words[0]), words[1], (*words, "")[2]


class PrefixLookup:
    """Follows the events of instances. Any thread asks it."""

    def __init__(self, sources: Sequence[EventSource], reader: PromptReader, keys_folder: Path | None = None) -> None:
        """`reader` makes tokens of requests as the instances do.

        Raises:
            ConfigError, IPCError: an address that is none, or keys that cannot be read.
        """
        self._reader, self._keys_folder = reader, keys_folder
        self._sources = {source.place: source for source in sources}
        self._mirrors: dict[Place, Mirror] = {}
        self._unusable: dict[Place, str] = {}  # why an instance's events say nothing here
        self._made_at, self._making, self._is_closed = time.monotonic(), threading.Lock(), False
        try:
            for source in sources:
                self._mirrors[source.place] = self._mirror_of(source)
        except CacheError:
            self.close()
            raise

    def close(self) -> None:
        """Listen no more."""
        with self._making:
            self._is_closed = True
        for mirror in self._mirrors.values():
            mirror.close()

    def places(self) -> Sequence[Place]:
        """Whose events are followed."""
        return list(self._sources)

    def look_up(self, body: bytes, path: str) -> PromptKnown | None:
        """What is cached of the prompts in a body, which takes some milliseconds; None: it has none that can be read,
        which is for an instance to say."""
        try:
            request = decode_request(body, KINDS.get(path))
            prompts = self._reader.prompts_of(request)
        except (RefusedFieldError, CacheError, ValueError, RecursionError) as error:
            logger.debug("event=prompt_not_looked_up error=%r", error)
            return None
        self._make_anew()
        mirrors = dict(self._mirrors)
        found = {place: self._find(place, mirror, prompts, request.namespace) for place, mirror in mirrors.items()}
        return PromptKnown(
            sum(map(len, prompts)), {place: each for place, each in found.items() if each is not None}, len(prompts)
        )

    def state_of(self, place: Place) -> InstanceState | None:
        """How well an instance is known; None where nobody listens to it."""
        mirror = self._mirrors.get(place)
        if mirror is None:
            return None
        blocks = {medium: mirror.num_blocks(medium) for medium in MEDIA}
        failure = str(mirror.failure) if mirror.failure is not None else self._unusable.get(place)
        return InstanceState(mirror.is_current and failure is None, blocks, failure)

    def _find(self, place: Place, mirror: Mirror, prompts: Sequence[Any], namespace: str) -> PrefixFound | None:
        try:
            found = [mirror.find(tokens, namespace) for tokens in prompts]
        except CacheError as error:  # such as names that cannot be made here; the others are known all the same
            if self._unusable.get(place) != str(error):
                self._unusable[place] = str(error)
                logger.warning("event=events_of_no_use at=%s:%d error=%r", *place, error)
            return None
        self._unusable.pop(place, None)
        if not mirror.is_current:
            return None
        return PrefixFound(
            num_tokens=sum(each.num_tokens for each in found),
            num_gpu_tokens=sum(each.num_gpu_tokens for each in found),
            num_cpu_tokens=sum(each.num_cpu_tokens for each in found),
            num_disk_tokens=sum(each.num_disk_tokens for each in found),
        )

    def _mirror_of(self, source: EventSource) -> Mirror:
        return Mirror(source.endpoint, keys_folder=self._keys_folder, publisher_key=source.key)

    def _make_anew(self) -> None:
        """Mirrors that have ended, such as for want of descriptors, seldom."""
        with self._making:
            ended = [place for place, mirror in self._mirrors.items() if mirror.failure is not None]
            if ended and not self._is_closed and time.monotonic() - self._made_at >= _AGAIN_SECONDS:
                self._made_at = time.monotonic()
                self._replace(ended)

    def _replace(self, ended: Sequence[Place]) -> None:
        for place in ended:
            logger.warning("event=mirror_made_anew at=%s:%d error=%r", *place, self._mirrors[place].failure)
            try:
                mirror = self._mirror_of(self._sources[place])
            except (CacheError, OSError) as error:
                logger.warning("event=mirror_not_made at=%s:%d error=%r", *place, error)
            else:
                self._mirrors[place] = mirror


def check_length(what: str, num_least: int, unit: str, request: ApiRequest) -> None:
    """Raise `RefusedFieldError` for what takes too long to tokenise; its instance refuses it sooner."""
    if num_least > _MOST_TOKENS:
        raise RefusedFieldError(request.prompt_field, f"{what} {num_least} {unit}; use at most {_MOST_TOKENS}")
