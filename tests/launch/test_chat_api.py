"""The chat endpoint without HTTP, over an engine that computes integers: clients that leave, engines that stand."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.launch.reference_engine.generation import (
    Generation,
    GenerationBusyError,
    GenerationError,
    GenerationRefusedError,
    GenerationTimeoutError,
)
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.server import chat, prefills
from fastdeploy_cache.launch.server.api_fields import RefusedFieldError
from fastdeploy_cache.launch.server.api_requests import ApiRequest, ChatRequest, CompletionRequest, Message, TextPart
from fastdeploy_cache.launch.server.chat import ChatApi
from fastdeploy_cache.launch.server.prefills import Prefill
from tests.rigs.integer_instance import PROMPT, SECONDS, Instance, instances, prefill

pytestmark = pytest.mark.processes

CHAT = ChatRequest(messages=[Message("user", "hello")], max_tokens=4)


class Numbers(ChatTokenizer):
    """Every chat is the same prompt."""

    def __init__(self) -> None:
        pass

    def min_tokens(self, messages: Any) -> int:
        return 0

    def encode_chat(self, messages: Any) -> np.ndarray[Any, Any]:
        return np.array(PROMPT)

    def token_bytes(self, token_id: int) -> bytes:
        return f"{token_id} ".encode()


async def complete(api: ChatApi, request: ApiRequest = CHAT) -> dict[str, Any]:
    return await api.complete(request, await api.submit(request), name="a-name")


async def stream(api: ChatApi) -> None:
    async for _ in api.stream(CHAT, await api.submit(CHAT), name="a-name"):
        pass


async def offer(api: ChatApi) -> None:
    await api.prefills.compute(CHAT)


def compute(api: ChatApi, request: ChatRequest = CHAT, client: str = "") -> Prefill:
    return asyncio.run(api.prefills.compute(request, client))


@pytest.mark.parametrize("ask", [complete, stream, offer])
@pytest.mark.parametrize("is_there", [False, True])
def test_nothing_comes(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[ChatApi], Awaitable[None]], is_there: bool
) -> None:
    """The engine stands still: a client that leaves, or has waited too long, leaves nothing behind in the queue."""
    for module, name in ((chat, "_TOKEN_TIMEOUT_SECONDS"), (prefills, "_OFFER_TIMEOUT_SECONDS")):
        monkeypatch.setattr(module, name, 0.2 if is_there else SECONDS)

    async def client(api: ChatApi) -> None:
        task = asyncio.ensure_future(ask(api))
        if not is_there:
            while not there.engine._line:
                await asyncio.sleep(0.01)
            task.cancel()
        await task

    with instances(prefill) as (there,):
        assert there.engine.pause(SECONDS)
        with pytest.raises(GenerationTimeoutError if is_there else asyncio.CancelledError):
            asyncio.run(client(ChatApi(there.engine, Numbers())))
        there.engine.resume()
        assert not there.engine.step()  # nobody waits, nobody runs
        assert there.model.num_computed_tokens == 0


class Texts(Numbers):
    """A prompt has a token for each of its characters."""

    def min_text_tokens(self, text: str) -> int:
        return len(text)

    def encode(self, text: str) -> np.ndarray[Any, Any]:
        return np.arange(1, len(text) + 1)


def test_of_several_prompts_none_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine refuses the last one, or the client leaves, the others are computed for no longer."""
    request = CompletionRequest(prompt=["one prompt", "a second one", "the third"], max_tokens=4)

    async def leave(api: ChatApi) -> None:
        task = asyncio.ensure_future(complete(api, request))
        while len(there.engine._line) < 3 and not task.done():
            await asyncio.sleep(0.01)
        task.cancel()
        await task

    with instances(lambda: Instance("mixed", 1)) as (there,):
        api, submit = ChatApi(there.engine, Texts()), there.engine.intake.submit
        assert there.engine.pause(SECONDS)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(leave(api))

        def submit_two(prompt: Any, *arguments: Any, **more: Any) -> Generation:
            if len(prompt) == len("the third"):
                raise GenerationError("the engine has stopped")
            return submit(prompt, *arguments, **more)

        monkeypatch.setattr(there.engine.intake, "submit", submit_two)
        with pytest.raises(GenerationError, match="has stopped"):
            asyncio.run(complete(api, request))
        there.engine.resume()
        assert not there.engine.step()  # nobody waits, nobody runs
        assert there.model.num_computed_tokens == 0


def test_nothing_is_offered_of_several_prompts() -> None:
    """An offer is of one prompt: whoever is asked for the answers computes these."""
    with instances(prefill) as (there,):
        request = CompletionRequest(prompt=["one prompt", "a second one"])
        found = asyncio.run(ChatApi(there.engine, Texts()).prefills.compute(request))
        assert found == (None, {"offer": None, "offer_id": None, "num_blocks": 0})


def test_an_offer_that_is_given_up() -> None:
    """Its blocks go home; given up once more, or never made, it is not found."""
    with instances(prefill) as (there,):
        api = ChatApi(there.engine, Numbers())
        generation, answer = compute(api)
        assert isinstance(generation, Generation)
        assert generation.send is not None
        assert generation.next_token(SECONDS) is None
        assert not generation.send.done
        assert api.prefills.cancel(answer["offer_id"])
        assert not generation.send.wait(SECONDS)
        assert generation.send.reason == "cancelled"
        assert not api.prefills.cancel(answer["offer_id"])


def test_ids_of_offers_cannot_be_guessed() -> None:
    """Of two prompts nothing in one answer, and no name that a log or a count gives away, ends the other's offer."""
    with instances(prefill) as (there,):
        api = ChatApi(there.engine, Numbers())
        (first, mine), (_, other) = (compute(api) for _ in range(2))
        assert first is not None and first.send is not None
        ids = [each["offer_id"] for each in (mine, other)]
        assert all(len(base64.urlsafe_b64decode(each + "=")) >= 16 for each in ids)
        assert ids[0][:4] != ids[1][:4]  # nothing is counted in them
        request_id, number = first.request.request_id, str(first.send.number)
        for guess in (request_id, number, "", mine["offer"], ids[0][:-1], ids[0].swapcase()):
            assert not api.prefills.cancel(guess)
        assert not first.send.done
        assert api.prefills.cancel(ids[0])


def num_cached(api: ChatApi, salt: str | None) -> int:
    chat = ChatRequest(messages=CHAT.messages, max_tokens=1, cache_salt=salt)
    return asyncio.run(complete(api, chat))["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_chats_with_different_salts_share_nothing() -> None:
    """Of the same prompt, each salt finds what was computed under it, and none of the others', the empty one's too."""
    with instances(lambda: Instance("mixed", 1)) as (there,):
        api = ChatApi(there.engine, Numbers())
        salts = [None, "a", "b", "A", "a ", " ", "a\0", "\u00e9", "e\u0301"]
        assert [num_cached(api, salt) for salt in salts] == [0] * len(salts)
        assert [num_cached(api, salt) for salt in salts] == [len(PROMPT) // 4 * 4] * len(salts)


def test_an_offer_under_one_salt_is_none_under_another() -> None:
    """The prefill side computes it in the salt's namespace; a chat with another salt, or none, is refused with it."""
    with instances(prefill, lambda: Instance("decode", 1)) as (there, here):
        computes, answers = ChatApi(there.engine, Numbers()), ChatApi(here.engine, Numbers())
        salted = ChatRequest(messages=CHAT.messages, max_tokens=1, cache_salt="a")
        offer = base64.b64decode(compute(computes, salted).answer["offer"])
        for salt in (None, "b"):
            with pytest.raises(GenerationRefusedError, match="namespace"):
                other = ChatRequest(messages=CHAT.messages, max_tokens=1, cache_salt=salt, kv_offer=offer)
                asyncio.run(answers.submit(other))
        with_offer = ChatRequest(messages=CHAT.messages, max_tokens=1, cache_salt="a", kv_offer=offer)
        answer = asyncio.run(complete(answers, with_offer))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) // 4 * 4
        assert num_cached(answers, None) == 0


def test_a_stop_text_ends_the_work() -> None:
    """The engine, which knows no texts, is told that nobody wants more, and finishes as an end token would have it."""

    async def ask(api: ChatApi) -> tuple[Generation, dict[str, Any]]:
        request = ChatRequest(messages=CHAT.messages, max_tokens=300, stop=" ")
        (generation,) = await api.submit(request)
        return generation, await api.complete(request, [generation], name="a-name")

    with instances(lambda: Instance("mixed", 1)) as (there,):
        generation, answer = asyncio.run(ask(ChatApi(there.engine, Numbers())))
        while generation.next_token(SECONDS) is not None:
            pass
    assert generation.cancelled and generation.finish_reason == answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1


class Longer(Numbers):
    """Knows how long a chat is at least, and must not be asked for more."""

    def min_tokens(self, messages: Any) -> int:
        return sum(len(message["content"]) for message in messages)

    def encode_chat(self, messages: Any) -> np.ndarray[Any, Any]:
        raise AssertionError("it was tokenised")


@pytest.mark.parametrize("content", ["x" * 397, [TextPart("x" * 200), TextPart("x" * 197)]])
def test_what_can_never_fit_is_not_tokenised(content: Any) -> None:
    """Chat and prefill refuse it by its length, with the numbers; one token less is tokenised."""
    with instances(prefill) as (there,):
        api = ChatApi(there.engine, Longer())
        for num_new in (4, 3):
            chat = ChatRequest(messages=[Message("user", content)], max_tokens=num_new)
            fault, words = (
                (AssertionError, "it was tokenised")
                if num_new == 3
                else (RefusedFieldError, "397 characters in 1 messages count as 397 tokens or more.*at most 400")
            )
            for ask in (api.submit, api.prefills.compute):
                with pytest.raises(fault, match=words):
                    asyncio.run(ask(chat))  # type: ignore[arg-type]


def test_open_prefills_of_one_client_leave_others_room() -> None:
    """Half of what the instance may send; over when they are read, given up or refused, and never counted twice."""
    with instances(lambda: Instance("prefill", 1, max_transfers=4)) as (there,):
        api = ChatApi(there.engine, Numbers())
        offered = [compute(api, client="a") for _ in range(2)]
        with pytest.raises(GenerationBusyError, match="2 prompts of a are computed, or offered and not read yet"):
            compute(api, client="a")
        others = [compute(api, client="b") for _ in range(2)]
        for prefill_, _ in (*offered, *others):
            assert prefill_ is not None and prefill_.send is not None
            api.cancel(prefill_)
            assert not prefill_.send.wait(SECONDS)
        too_long = ChatRequest(messages=CHAT.messages, max_tokens=400)
        for _ in range(3):
            with pytest.raises(RefusedFieldError):
                compute(api, too_long, "a")
        assert compute(api, client="a").generation is not None


def test_a_prompt_that_the_answer_makes_too_long() -> None:
    """It is refused by both with the same limit, before it is computed."""
    with instances(prefill) as (there,):
        api, limit = ChatApi(there.engine, Numbers()), 400 - len(PROMPT)
        too_long = ChatRequest(messages=CHAT.messages, max_tokens=limit + 1)
        words = f"messages have 22 tokens, and {limit + 1} new ones are asked for; together they must be at most 400, "
        for ask in (api.submit, api.prefills.compute):
            with pytest.raises(RefusedFieldError, match=words) as refused:
                asyncio.run(ask(too_long))  # type: ignore[arg-type]
            assert (refused.value.field, refused.value.code) == ("messages", "context_length_exceeded")
        generation, _ = compute(api, ChatRequest(messages=CHAT.messages, max_tokens=limit))
        assert generation is not None
        api.cancel(generation)


@pytest.mark.parametrize(
    ("num_new", "words"),
    [
        (
            None,
            r"390 tokens, and 64 new ones are asked for by default \(max_tokens\); together they must be at most 400, ",
        ),
        (20, "390 tokens, and 20 new ones are asked for; together they must be at most 400, "),
        (999_999, "max_tokens is 999999; prompt and answer together have at most 400 tokens, "),
    ],
)
def test_a_limit_says_what_it_comes_of(num_new: int | None, words: str) -> None:
    """The pool with its blocks, and the setting that asks for so many tokens, also where nobody has set it."""
    with instances(prefill) as (there,):
        api, config = ChatApi(there.engine, Numbers()), there.cache.config
        pool = f"as the GPU pool has {config.pool_sizes()[0]} blocks of {config.block_size} tokens"
        with pytest.raises(RefusedFieldError, match=f"{words}({pool}|the model's context)"):
            api._check_fits("messages have", 390, "tokens", ChatRequest(messages=CHAT.messages, max_tokens=num_new))
