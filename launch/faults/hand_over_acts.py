"""What a user does with other engines: it hands prompts over to them, and takes theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.errors import OutOfBlocksError, PeerError, PromptTooLongError, RequestError
from fastdeploy_cache.launch.faults.stage import GivenUpError, Home, StoryStage
from fastdeploy_cache.launch.faults.story import MAX_RUNNING, NUM_TEXTS, Act

if TYPE_CHECKING:
    from fastdeploy_cache.peers.transfers import Send

_PATIENCE = (0.05, 5.0)
_MOST_LOOKS, _LOOK_SECONDS = 50, 0.02  # whether somebody reads what was offered
_MAIL_SECONDS, _READY_SECONDS = 2.0, 4.0
_WORKER_SHARE, _COMING_SECONDS = 0.8, (0.01, 0.1, 1.0)

T = TypeVar("T")


class Partner(Protocol):
    """A user, as far as these acts know one."""

    engine: Home
    world: StoryStage
    cache: PrefixCacheManager
    running: Any

    def call(self, verb: str, call: Callable[[], T], limit_seconds: float = 0.0) -> T:
        """Call a verb, which has to come back in time."""
        ...

    def new_prompt(self, tokens: list[int], namespace: str) -> Any:
        """One that nobody has matched."""
        ...

    def match(self, prompt: Any, patience: float, *, ahead: bool) -> None:
        """It runs, if there is room for it."""
        ...

    def admit(self, act: Act) -> None:
        """Match a prompt, and compute it."""
        ...

    def advance(self, act: Act) -> None:
        """Compute some more of a prompt."""
        ...

    def end(self, act: Act) -> None:
        """A prompt is over."""
        ...

    def leave_all(self) -> None:
        """Let everything go."""
        ...


class HandOverActs:
    """What one user may do so."""

    def __init__(self, user: Partner) -> None:
        self._user, self._cache, self._engine = user, user.cache, user.engine
        self.acts: Mapping[str, Callable[[Act], None]] = {"offer": self._offer, "receive": self._receive}

    def _others(self) -> list[Any]:
        return [engine for engine in self._user.world.engines if engine is not self._engine]

    def _offer(self, act: Act) -> None:
        """Hand a prompt over: to the next engine."""
        user = self._user
        if not user.running:
            user.admit(Act("admit", act.second, act.third, act.second))
        self._wait_until_ready(act)
        if user.running:
            prompt = user.running[act.first % len(user.running)]
            prompt.send = self._change_offer(prompt.request, prompt.send)
            if prompt.send is not None:
                others = self._others()
                mail = (prompt.send.offer, list(prompt.tokens), prompt.namespace)
                others[act.second % len(others)].mail.append(mail)
            while prompt in user.running and act.third % 3 and prompt.num_computed < len(prompt.tokens):
                before = prompt.num_computed
                user.advance(Act("advance", user.running.index(prompt), act.third))
                if prompt.num_computed == before:
                    return
            if prompt.send is not None and act.third % 3 == 2:
                self._take_back(prompt)

    def _change_offer(self, request: Request, send: Send | None) -> Send | None:
        """Offer it, or take the offer back that there is; None where it is not offered."""
        peers = self._cache.peers
        if send is not None:
            self._user.call("cancel_send", lambda: peers.cancel_send(send))
            return None
        try:
            if not (self._engine.settings.agents and len(request.request_id) % 2):
                return self._user.call("offer", lambda: peers.offer(request))
            loan = self._user.call("lend", lambda: peers.lend(request))
        except (PeerError, RequestError):
            return None
        self._engine.seen["lent"] += 1
        return loan

    def _take_back(self, prompt: Any) -> None:
        """The client has gone away while others may be reading; its blocks are the next one's."""
        user, host = self._user, self._user.world.host
        readers = [reader for engine in self._others() for reader in engine.users]
        for _ in range(_MOST_LOOKS):
            if any(reader.verb == "receive wait" for reader in readers):
                break
            host.sleep(_LOOK_SECONDS)
        host.sleep(host.chance.choice((0.001, 0.1, 0.5, 2.0)) * host.chance.random())
        prompt.send = self._change_offer(prompt.request, prompt.send)
        user.leave_all()
        user.call("reset", self._cache.reset)  # or they would be the last to be evicted
        self._engine.look_at_free_blocks()
        for number in range(NUM_TEXTS):
            user.admit(Act("admit", number, number, 1))

    def _receive(self, act: Act) -> None:
        """Take an offer, wait, and go on with it as with any prompt. `first`: 1 waits for an offer. `second`: odd takes
        the newest one, and may forget the older ones."""
        user, host = self._user, self._user.world.host
        self._wait_until_ready(act)
        deadline = host.now() + _MAIL_SECONDS * (act.first == 1)
        while not self._engine.mail and host.now() < deadline:
            host.sleep(_LOOK_SECONDS)
        is_newest = bool(act.second % 2)
        try:
            offer, tokens, namespace = self._engine.mail.pop() if is_newest else self._engine.mail.popleft()
        except IndexError:  # nothing has come, or another user of this engine was first
            return
        if is_newest and act.second % 4 == 1:
            self._engine.mail.clear()
        if len(user.running) >= MAX_RUNNING:
            user.end(act)
        prompt = user.new_prompt(tokens, namespace)
        patience = _PATIENCE[act.third % 4 != 1]  # most are worth waiting for
        if self._has_received(prompt.request, offer, patience):
            self._engine.seen["received"] += 1
        prompt.generation = self._cache.blocks.generation  # what was lost while it came was not its
        try:
            user.match(prompt, patience, ahead=False)
        except GivenUpError:  # what has come would wait for its match
            user.call("cancel_receive", lambda: self._cache.peers.cancel_receive(prompt.request))
            raise

    def _wait_until_ready(self, act: Act) -> None:
        """Most are patient: while a peer process starts, nothing is offered and nothing comes."""
        if act.second % 4:
            self._user.call("wait_ready", lambda: self._cache.peers.wait_ready(_READY_SECONDS), _READY_SECONDS)

    def _has_received(self, request: Request, offer: bytes, patience: float) -> bool:
        """Whether all that was offered has come in time."""
        peers = self._cache.peers
        try:
            receive = self._user.call("receive", lambda: peers.receive(request, offer))
        except (PeerError, OutOfBlocksError, PromptTooLongError):
            return False
        engine, host = self._engine, self._user.world.host
        if engine.workers is not None and host.chance.random() < _WORKER_SHARE:  # which dies while it comes
            host.sleep(host.chance.choice(_COMING_SECONDS) * host.chance.random())
            engine.workers.replace(host.chance.randrange(engine.settings.tp_size), self._user.call, lambda: None)
        return self._user.call("receive wait", lambda: receive.wait(patience), patience)
