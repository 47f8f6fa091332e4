"""The benchmark of lending: a prompt that another instance has, borrowed or computed."""

from __future__ import annotations

import http.client
import json
import random
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.report import Figure, Report, at_most
from fastdeploy_cache.launch.demo.routed_servers import RoutedAnswer, ask, started
from fastdeploy_cache.launch.server.api_requests import LEND_PATH

_WORDS = ("whales", "swim", "under", "the", "cold", "dark", "sea", "while", "birds", "sit", "on", "rocks")
_LENGTHS, _ROUNDS = (12, 25, 50, 100, 200, 400), 5  # words of prompts
_SECONDS = 60.0
_MOST_SHARE = 0.5  # of the longest prompt, borrowing takes half of the time of computing at most


def bench_lending(json_file: Path | None) -> bool:
    """Measure both in turn; whether borrowing a long prompt was faster.

    Raises:
        LaunchError: an instance does not start, or a chat is not answered.
    """
    with Report(json_file) as report, TemporaryDirectory(prefix="fastdeploy-lending-") as folder:
        with started(Path(folder), lambda _: None) as servers:
            lender, borrower = (url for url, _ in servers.instances(2))
            draw = random.Random(5)  # noqa: S311 (made-up prompts)
            for url in (lender, borrower):
                for length in _LENGTHS:  # the first run of a model in a process takes longer than all later ones
                    ask(url, _prompt(draw, length), salt=f"warm-up {url}", max_new_tokens=2)
            lines = [_bench(lender, borrower, draw, length) for length in _LENGTHS]
        about = "to the first token, over HTTP; borrowed: with the question to the lender"
        report.table("A prompt that another instance has", dict(lines), about=about, label="prompt")
        return report.end()


def _prompt(draw: random.Random, num_words: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": " ".join(draw.choices(_WORDS, k=num_words))}]


def _bench(lender: str, borrower: str, draw: random.Random, length: int) -> tuple[str, list[Figure]]:
    computed, borrowed, num_tokens = list[float](), list[float](), 0
    for number in range(_ROUNDS):
        prompt, salt = _prompt(draw, length), f"{length} {number}"
        answer = ask(lender, prompt, salt=salt, max_new_tokens=2)
        computed.append(answer.seconds_to_first_token * 1e3)
        num_tokens = answer.prompt_tokens
        seconds, found = _borrow(lender, borrower, prompt, salt)
        borrowed.append(seconds * 1e3)
        if found.text != answer.text or not found.cached_tokens:
            raise LaunchError(f"what was borrowed gives another answer, or none came: {found}")
    is_longest = length == _LENGTHS[-1]
    promise = at_most("borrowing the longest prompt, of computing it", _MOST_SHARE) if is_longest else None
    base = Figure("computed", median(computed), "ms")
    other = Figure("borrowed", median(borrowed), "ms", baseline=base, promise=promise)
    return f"about {num_tokens} tokens", [base, other]


def _borrow(lender: str, borrower: str, prompt: list[dict[str, str]], salt: str) -> tuple[float, RoutedAnswer]:
    """Ask the lender, and then the borrower, as a router does it. The seconds to the first token, both together."""
    begun = monotonic()
    connection = http.client.HTTPConnection(lender.removeprefix("http://"), timeout=_SECONDS)
    try:
        connection.request("POST", LEND_PATH, json.dumps({"messages": prompt, "cache_salt": salt}))
        offer: dict[str, Any] = json.loads(connection.getresponse().read())
    except (OSError, ValueError) as error:
        raise LaunchError(f"{lender} lends nothing: {error!r}") from error
    finally:
        connection.close()
    seconds = monotonic() - begun
    answer = ask(borrower, prompt, salt=salt, max_new_tokens=2, kv_offer=offer["offer"], kv_is_lent=True)
    return seconds + answer.seconds_to_first_token, answer
