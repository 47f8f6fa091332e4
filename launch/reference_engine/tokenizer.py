"""SmolLM2's tokeniser and chat format, rebuilt from the GGUF; the only file that imports tokenizers."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_cache.errors import ModelLoadError
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles

TokenArray = np.ndarray[Any, np.dtype[np.int32]]

_CONTROL = 3  # llama.cpp's token type of <|im_start|> and the like
_TURN_MARKUP = 3  # tokens of each turn beside its text: its begin, its end and the newline behind that
_DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class ChatTokenizer:
    """Text to token ids and back, and SmolLM2's chat format.

    Raises:
        ModelLoadError: the package tokenizers is missing.
    """

    def __init__(self, files: ModelFiles) -> None:
        kinds = zip(files.vocab, files.token_types, strict=True)
        control = [token for token, kind in kinds if kind == _CONTROL]
        self.eos_token_id = files.spec.eos_token_id
        self._im_start = files.vocab.index("<|im_start|>")
        self._im_end = files.vocab.index("<|im_end|>")
        self._text, self._markup = _build(files, control)
        self._token_bytes = _token_bytes(files.vocab, frozenset(control))
        self.max_token_bytes = max(map(len, self._token_bytes))
        self._max_markup_bytes = max(self.max_token_bytes, *(len(token.encode()) for token in control))
        self._newline = self._plain("\n")

    def encode(self, text: str) -> TokenArray:
        """Token ids of ``text``; control tokens such as ``<|im_end|>`` are recognised in it."""
        return np.array(_encode(self._markup, text), dtype=np.int32)

    def min_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        """`encode_chat` gives no fewer than this, as no token stands for more than `max_token_bytes`.

        Only lengths are looked at: a text that can never fit need not be tokenised to know it. Characters that have no
        token (some control characters) are counted like others: to tokenise many of them takes as long.
        """
        size = self.max_token_bytes
        texts = (_turn_text(message["role"], message["content"]) for message in messages)
        return sum(_TURN_MARKUP + math.ceil(len(text.encode(errors="surrogatepass")) / size) for text in texts)

    def min_text_tokens(self, text: str) -> int:
        """`encode` gives no fewer than this: see `min_tokens`. A control token stands for the bytes that it is
        written with."""
        return math.ceil(len(text.encode(errors="surrogatepass")) / self._max_markup_bytes)

    @property
    def num_tokens(self) -> int:
        """How many token ids there are, from 0 on."""
        return len(self._token_bytes)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> TokenArray:
        """Token ids of a conversation, up to and with the header of the assistant's next reply.

        As in the model's own template, a default system message goes first unless there is one.
        Control tokens inside a message are plain text: a user cannot close their own turn.

        Args:
            messages: each with "role" and "content".

        Raises:
            ValueError: no message, or one without role or content.
        """
        if not messages:
            raise ValueError("a chat needs at least one message, got none")
        ids: list[int] = []
        for index, message in enumerate(messages):
            if "role" not in message or "content" not in message:
                raise ValueError(f"message {index} has the keys {sorted(message)}; it needs role and content")
            if index == 0 and message["role"] != "system":
                ids += self._turn("system", _DEFAULT_SYSTEM)
            ids += self._turn(message["role"], message["content"])
        return np.array(ids + self._reply_header(), dtype=np.int32)

    def extend_chat(self, previous_token_ids: Sequence[int] | TokenArray, user_text: str) -> TokenArray:
        """The next prompt of a conversation: the previous ids unchanged, then a new user turn.

        Re-tokenising a reply's text may give other ids than were generated, and then no cached block
        of the conversation would match; so the earlier part is kept as it is.

        Args:
            previous_token_ids: the last prompt and the generated reply, with or without its end token.
            user_text: the user's next message.
        """
        ids = [int(token_id) for token_id in previous_token_ids]
        if not ids or ids[-1] != self._im_end:
            ids.append(self._im_end)
        ids += self._newline + self._turn("user", user_text) + self._reply_header()
        return np.array(ids, dtype=np.int32)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of ``token_ids`` without control tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may end within a character; empty for a control token.

        Raises:
            ValueError: not a token id.
        """
        if not 0 <= token_id < len(self._token_bytes):
            raise ValueError(f"token id {token_id} is outside 0..{len(self._token_bytes) - 1}")
        return self._token_bytes[token_id]

    def write_hf_files(self, folder: Path, chat_template: str) -> None:
        """Write `tokenizer.json` and its configuration, as Hugging Face's loaders read them."""
        self._markup.save(str(folder / "tokenizer.json"))
        end = self._markup.id_to_token(self._im_end)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": chat_template,
            "eos_token": end,
            "pad_token": end,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))

    def _plain(self, text: str) -> list[int]:
        return _encode(self._text, text)

    def _turn(self, role: str, content: str) -> list[int]:
        return [self._im_start, *self._plain(_turn_text(role, content)), self._im_end, *self._newline]

    def _reply_header(self) -> list[int]:
        return [self._im_start, *self._plain("assistant\n")]


class StreamDecoder:
    """Decodes one reply token by token; the pieces joined equal ``ChatTokenizer.decode`` of all ids."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; "" while a character is still cut."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What was held back, when the reply ends within a character."""
        return self._decoder.decode(b"", final=True)


def _turn_text(role: str, content: str) -> str:
    return f"{role}\n{content}"


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Encode a batch of one: that lets other threads go on meanwhile, while `encode` keeps the interpreter's lock."""
    return list(tokenizer.encode_batch_fast([text])[0].ids)


def _build(files: ModelFiles, control: list[str]) -> tuple[Any, Any]:
    """Two tokenisers on one model: the first takes all text literally, the second knows control tokens."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise ModelLoadError(
            f"cannot import tokenizers ({error}); run: pip install 'fastdeploy-cache[demo]'"
        ) from error
    vocab = {token: token_id for token_id, token in enumerate(files.vocab)}
    left_right = [line.partition(" ") for line in files.merges]
    model = models.BPE(vocab, [(left, right) for left, _, right in left_right])
    both = Tokenizer(model), Tokenizer(model)
    for tokenizer in both:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    both[1].decoder = decoders.ByteLevel()  # for whoever loads the file that it is written to
    both[1].add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return both


def _token_bytes(vocab: list[str], control: frozenset[str]) -> list[bytes]:
    """Undo GPT-2's byte-level alphabet: printable bytes stand for themselves, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return [b"" if token in control else bytes(byte_of[char] for char in token) for token in vocab]
