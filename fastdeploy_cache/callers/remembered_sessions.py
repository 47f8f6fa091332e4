"""The last request of each session, by which its prefix is found."""

from __future__ import annotations

from collections import OrderedDict

from fastdeploy_cache.request import Request

MAX_SESSIONS = 32_768
MAX_BYTES = 64 * 2**20  # of tokens, of all of them
_Name = tuple[str, str]  # namespace and session


class RememberedSessions:
    """Those that asked last, as many as there is room for. One thread at a time."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_bytes, self._max_sessions = max_bytes, max_sessions
        self._last: OrderedDict[_Name, tuple[Request, int]] = OrderedDict()  # with the bytes that it had then
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._last)

    def note(self, request: Request) -> None:
        """A request of a session is over. One that is larger than all the room is not remembered, nor is one that only
        begins as another one of the session does, which may run beside it."""
        name = request.namespace, request.session_id
        if (known := self._last.get(name)) is not None:
            if known[0] is not request and _begins_with(known[0], request):
                self._last.move_to_end(name)
                return
            self.forget(*name)
        num_bytes = len(request.prompt) + len(request.output) + len(request.session_id) + len(request.namespace)
        if num_bytes > self._max_bytes:
            return
        self._last[name] = request, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes or len(self._last) > self._max_sessions:
            self.forget(*next(iter(self._last)))

    def find(self, namespace: str, session_id: str) -> Request | None:
        """Its last request, if it is remembered."""
        found = self._last.get((namespace, session_id))
        return found[0] if found is not None else None

    def forget_namespace(self, namespace: str) -> None:
        """All of a namespace have ended."""
        for name in [name for name in self._last if name[0] == namespace]:
            self.forget(*name)

    def forget(self, namespace: str, session_id: str) -> None:
        """It has ended."""
        _, num_bytes = self._last.pop((namespace, session_id), (None, 0))
        self._num_bytes -= num_bytes


def _begins_with(known: Request, request: Request) -> bool:
    """Whether a request's tokens are the first of another one's."""
    return known.num_tokens >= request.num_tokens and known.tokens.startswith(request.tokens)
