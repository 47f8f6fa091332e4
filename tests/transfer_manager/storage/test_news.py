"""What a store tells whoever listens, in answers of bounded size."""

from __future__ import annotations

import hashlib

from fastdeploy_cache.transfer_manager.storage.keys import PROBE_OWNER, owned
from fastdeploy_cache.transfer_manager.storage.news import NewsLog

_MOST = 4096


def name(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def split(joined: bytes) -> list[bytes]:
    return [joined[at : at + 32] for at in range(0, len(joined), 32)]


def test_a_large_store_is_told_in_pieces() -> None:
    """None has more names than an answer may, what has gone comes first, and nothing is told twice."""
    entries = dict.fromkeys(map(name, range(10_000)))
    log = NewsLog(1, entries)
    first = log.take()
    assert first is not None and first.number == 0 and split(first.came) == [name(n) for n in range(_MOST)]
    for number in (1, 9_999, 5_000):
        del entries[name(number)]
        log.note(name(number), is_there=False)
    rest = []
    while (news := log.take()) is not None:
        rest.append(news)
    assert [(news.number, news.has_more) for news in rest] == [(1, True), (2, False)] and first.has_more
    assert split(rest[0].gone) == [name(1), name(9_999), name(5_000)] and not rest[1].gone
    assert all(len(news.came + news.gone) <= 32 * _MOST for news in rest)
    came = split(rest[0].came + rest[1].came)
    assert sorted(came) == sorted(name(n) for n in range(_MOST, 9_999) if n != 5_000)


def test_the_last_of_each_name_counts() -> None:
    """Gone and written again, or the other way: one thing is told."""
    log = NewsLog(1, {name(1): None})
    log.note(name(1), is_there=False)
    log.note(name(2), is_there=True)
    log.note(name(2), is_there=False)
    log.note(name(1), is_there=True)
    news = log.take()
    assert news is not None and (split(news.came), split(news.gone)) == ([name(1)], [name(2)])


def test_an_empty_store_says_so_once() -> None:
    """By that a listener knows that all was told anew; noise is no news."""
    log = NewsLog(1, {})
    assert log.take() == (0, b"", b"", False) and log.take() is None
    noise = owned(name(1), PROBE_OWNER)
    log.note(noise, is_there=True)
    log.note(noise, is_there=False)
    assert log.take() is None
