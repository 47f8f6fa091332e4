"""The text of an answer as its tokens come, up to where it is to stop."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer, StreamDecoder


class AnswerText:
    """Pieces of one answer. What may be the begin of a stop text is held back until more has come."""

    def __init__(self, tokenizer: ChatTokenizer, stop_texts: Sequence[str]) -> None:
        self._decoder, self._stop_texts = StreamDecoder(tokenizer), stop_texts
        self._held = ""
        self.num_tokens = 0
        self.has_stopped = False  # a stop text was found; what is from there on belongs to no piece

    def push(self, token_id: int) -> str:
        """What can be said with this token; "" while a character or a stop text may still be cut."""
        self.num_tokens += 1
        return self._take(self._decoder.push(token_id))

    def finish(self) -> str:
        """What was held back, when no token follows."""
        if self.has_stopped:
            return ""
        piece = self._take(self._decoder.finish()) + self._held
        self._held = ""
        return piece

    def _take(self, text: str) -> str:
        text = self._held + text
        found = [place for stop in self._stop_texts if (place := text.find(stop)) >= 0]
        if found:
            self._held, self.has_stopped = "", True
            return text[: min(found)]
        num_held = max((_num_begun(text, stop) for stop in self._stop_texts), default=0)
        said = len(text) - num_held
        self._held = text[said:]
        return text[:said]


def _num_begun(text: str, stop: str) -> int:
    """How many characters at the end of the text are a begin of the stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
