"""A mirror of what another process has cached: `fastdeploy_cache.events.Mirror`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from fastdeploy_cache.books.tokens import TokenIds
from fastdeploy_cache.config.events import EventsConfig
from fastdeploy_cache.errors import CodecError, ConfigError, IPCError
from fastdeploy_cache.events.follower import Follower, ReplayFrom
from fastdeploy_cache.events.index import PrefixFound
from fastdeploy_cache.events.names import BlockNaming, Image, NameScheme, name_blocks
from fastdeploy_cache.events.questions import Answer, PublisherState
from fastdeploy_cache.events.wire import MEDIA, BlockName
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Clock
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.ipc.event_stream import Answered, Disconnected, EventInlet, Heard, StreamAddress
from fastdeploy_cache.ipc.peer_channel import load_keys
from fastdeploy_cache.ipc.poller import Poller, Wakeup

logger = event_log(__name__)

_ANSWER_SECONDS, _REFUSED_SECONDS = 2.0, 0.2  # then a question is asked again
_FIRST_SILENCE_SECONDS = 5.0  # while nobody has said how often a heartbeat comes
_NUM_HEARTBEATS = 4  # that may be missed
_LONGEST_SECONDS = 3600.0
_MOST_AT_ONCE = 32  # messages taken in under the lock
_KEY_CHARACTERS = 40


class Mirror:
    """Follows a publisher from any moment on, and says how much of a prompt it has cached.

    It is *current* while it has taken in all that the publisher has sent, as far as that has come. It is not before
    the first snapshot is there, and not from a loss, a restart or a silence of the publisher until it has caught up:
    then it finds nothing, so that it never says of a block that it is cached when it had gone as the last message was
    sent. Any thread may ask; a thread of its own listens.

    Attributes:
        failure: why it listens no more; None: it does, or was closed.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        keys_folder: str | Path | None = None,
        publisher_key: bytes | str = b"",
        on_message: Callable[[int, bytes], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Connect; nothing is waited for, and the publisher may come later.

        `endpoint` and `replay_endpoint` are those of its settings, with the same default. `topic`: that of its
        settings, or how that begins. Where it has keys, `keys_folder` has one's own, and `publisher_key` is its
        public key: the text of 40 characters behind `public-key` in its `own.key`.

        `on_message` is called with the sequence and the payload of each message that is taken in, also of one that was
        asked for again, on the mirror's thread. What it raises of `OSError` ends the mirror.

        Raises:
            ConfigError, IPCError: addresses or keys that are none, or keys that cannot be read.
        """
        folder = str(keys_folder) if keys_folder is not None else None
        settings = EventsConfig(endpoint=endpoint, replay_endpoint=replay_endpoint, keys_folder=folder)
        publisher_key = publisher_key.encode() if isinstance(publisher_key, str) else publisher_key
        keys = load_keys(Path(keys_folder)) if keys_folder is not None else None
        if keys is not None and len(publisher_key) != _KEY_CHARACTERS:
            raise ConfigError(f"publisher_key is {publisher_key!r}; give the publisher's public key, of 40 characters")
        self._address = StreamAddress(*settings.endpoints(0), topic.encode(), keys)
        self._clock, self._on_message = clock, on_message
        self._inlet = EventInlet(self._address, publisher_key)
        self._follower, self._lock = Follower(keeps_taken=on_message is not None), threading.Condition()
        self.failure: Exception | None = None
        self._naming: tuple[NameScheme, BlockNaming] | None = None
        self._heard_at = self._asked_at = clock.now()
        self._share = clock.random_bytes(1)[0] / 255
        self._is_closing, self._wakeup = False, Wakeup()
        self._thread = threading.Thread(target=self._run, name="event-mirror", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. It is current no more. Safe to call twice, and from `on_message`."""
        self._is_closing = True
        self._wakeup.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def wait_closed(self, timeout_seconds: float | None) -> bool:
        """Wait until it listens no more: `close` was called, or its thread has ended with `failure`."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # -- asking

    @property
    def is_current(self) -> bool:
        """Whether it knows what is cached now."""
        return self._follower.is_current

    def wait_current(self, timeout_seconds: float) -> bool:
        """Wait until it is current; False when the time is over first."""
        with self._lock:
            return self._lock.wait_for(lambda: self._follower.is_current, timeout_seconds)

    @property
    def block_size(self) -> int | None:
        """Tokens in a block; None before the first snapshot."""
        scheme = self._follower.scheme
        return scheme.block_size if scheme is not None else None

    def find(self, token_ids: TokenIds, namespace: str = "", images: Sequence[Image] = ()) -> PrefixFound:
        """How many leading tokens of a prompt are cached; none while it is not current. `images` as of a request.

        Raises:
            RequestError: these are no token ids.
            ConfigError: the publisher names blocks as vLLM does, and cbor2 is missing here.
        """
        names = self.names(token_ids, namespace, images)
        return self.find_names(names) if names is not None else PrefixFound()

    def names(self, token_ids: TokenIds, namespace: str = "", images: Sequence[Image] = ()) -> list[BlockName] | None:
        """What the full blocks of a prompt are called; None before the first snapshot. Raises as `find`.

        Mirrors of publishers that name blocks alike can be asked for the same names with `find_names`.
        """
        scheme = self._follower.scheme
        if scheme is None:
            return None
        if self._naming is None or self._naming[0] != scheme:
            self._naming = scheme, scheme.names()
        return [*name_blocks(*self._naming, token_ids, namespace, images)]

    def find_names(self, names: Sequence[BlockName]) -> PrefixFound:
        """How many leading tokens of a prompt are cached whose blocks are called so."""
        with self._lock:
            follower = self._follower
            if not follower.is_current or follower.scheme is None:
                return PrefixFound()
            return follower.index.find(names, follower.scheme.block_size)

    def num_blocks(self, medium: str) -> int:
        """How many blocks are in a medium: GPU, CPU or DISK; 0 while it is not current. Raises `ConfigError`: there is
        no such medium."""
        if medium not in MEDIA:
            raise ConfigError(f"there is no medium {medium!r}; use one of {', '.join(MEDIA)}")
        with self._lock:
            return self._follower.index.num_blocks(medium) if self._follower.is_current else 0

    def counts(self) -> dict[str, int]:
        """Messages, snapshots and replays that were taken in."""
        follower = self._follower
        return {
            "messages": follower.num_messages,
            "snapshots": follower.num_snapshots,
            "replays": follower.num_replays,
        }

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._ask()
                self._wait()
                self._listen()
                while self._follower.taken:
                    self._tell(*self._follower.taken.popleft())
        except (IPCError, OSError, MemoryError) as error:
            self.failure = error
            logger.info("event=mirror_failed error=%r", error)
        finally:  # whatever ends it: what is known gets old from now on
            with self._lock:
                self._is_closing = True
                self._follower.on_disconnected()
                self._lock.notify_all()
            self._inlet.close()
            self._wakeup.close()

    def _tell(self, sequence: int, payload: bytes) -> None:
        if self._on_message is not None:
            self._on_message(sequence, payload)

    def _wait(self) -> None:
        poller = Poller(self._clock)
        for source in self._inlet.sources():
            poller.register(source, source)
        poller.register(self._wakeup.fd, self._wakeup)
        poller.wait(min(_LONGEST_SECONDS, max(0.0, self._silent_at() - self._clock.now())))

    def _silent_at(self) -> float:
        """When a missing answer, or message, says something."""
        if not self._follower.is_current:  # an answer is due
            return self._asked_at + (self._rest() if self._follower.is_refused else _ANSWER_SECONDS)
        return self._heard_at + (_NUM_HEARTBEATS * self._follower.heartbeat_seconds or _FIRST_SILENCE_SECONDS)

    def _rest(self) -> float:
        """Seconds before it asks again: others were refused at the same time."""
        return _REFUSED_SECONDS * (0.5 + self._share)

    def _listen(self) -> None:
        with self._lock:
            follower = self._follower
            for _ in range(_MOST_AT_ONCE):
                heard = self._inlet.get()
                if heard is None:
                    break
                self._take_in(heard)
                if (question := follower.take_question()) is not None:
                    self._send(question)
            if self._clock.now() >= self._silent_at():
                follower.on_silence()
                self._inlet.renew()
                self._heard_at = self._clock.now()
            self._lock.notify_all()

    def _take_in(self, heard: Heard | Answered | Disconnected) -> None:
        follower = self._follower
        if isinstance(heard, Disconnected):
            follower.on_disconnected()
            self._inlet.renew()  # answers of the old one may still lie there, and would be taken for the new one's
        elif isinstance(heard, Answered):
            try:
                answer: Answer = decode(heard.answer, Answer)
            except CodecError:
                return  # it is asked again
            if isinstance(answer, PublisherState) and not answer.topic.encode().startswith(self._address.topic):
                said = self._address.topic.decode()
                raise IPCError(f"topic is {said!r}, and the publisher's is {answer.topic!r}: none of it would be heard")
            follower.on_answer(answer)
        elif not heard.is_replayed:
            self._heard_at = self._clock.now()
            follower.on_message(heard.sequence, heard.payload)
        elif heard.sequence < 0:
            follower.on_replay_end()
        else:
            follower.on_replayed(heard.sequence, heard.payload)

    def _ask(self) -> None:
        with self._lock:
            question = self._follower.take_question()
        if question is not None:
            self._send(question)

    def _send(self, question: object) -> None:
        self._asked_at = self._clock.now()
        if isinstance(question, ReplayFrom):
            self._inlet.ask(question.start.to_bytes(8, "big"))
        else:
            self._inlet.ask(encode(question))  # type: ignore[arg-type]
