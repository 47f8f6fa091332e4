"""A namespace is forgotten: nothing of it is found, in no tier, and no byte of it is left, but what is reported."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, Request, StorageConfig, TransferConfig
from fastdeploy_cache.errors import ClosedError, ConfigError, OutOfBlocksError, RequestError
from fastdeploy_cache.storage.forget_report import ForgetReport
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.cache_model import CacheModel
from tests.rigs.command_line import CLI
from tests.rigs.simulated_storage import SimulatedStorage
from tests.rigs.storage_rig import STORE

SIZE, NUM_BLOCKS, SECONDS = 4, 6, 30.0
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32")
SECRET = np.float32(1234.5)
EMPTY = ForgetReport(
    num_gpu_blocks=0,
    num_cpu_blocks=0,
    num_held_blocks=0,
    num_requests=0,
    num_waiting_blocks=0,
    num_stored_objects=0,
    left=(),
)


def _config(**settings: Any) -> CacheConfig:
    return CacheConfig(
        **{
            "block_size": SIZE,
            "num_gpu_blocks": 24,
            "num_cpu_blocks": 24,
            "layout": LAYOUT,
            "cpu_write_policy": "write_through",
            "load_policy": "always",
            **settings,
        }
    )


def _tokens(namespace: str) -> list[int]:
    return [len(namespace) * 100 + place for place in range(NUM_BLOCKS * SIZE)]


def _serve(cache: PrefixCacheManager, namespace: str, value: np.float32, num_ranks: int) -> list[int]:
    """A whole request, whose every number is this value; its blocks."""
    request = Request(request_id=f"of {namespace}", prompt_token_ids=[*_tokens(namespace), 1], namespace=namespace)
    cache.match(request)
    blocks = cache.allocate(request, NUM_BLOCKS + 1)
    for rank in range(num_ranks):
        for layer in cache.ranks.kv_views(rank):
            for part in layer.values():
                part[blocks] = value
    cache.commit(request, NUM_BLOCKS * SIZE)
    cache.release(request)
    assert cache.wait_for_transfers(SECONDS)
    return blocks


def _found(cache: PrefixCacheManager, namespace: str) -> int:
    """Tokens that are cached for another request with the same prompt; it fetches what storage has."""
    request = Request(request_id=f"again {namespace}", prompt_token_ids=[*_tokens(namespace), 1], namespace=namespace)
    cache.prefetch(request)
    match = cache.match(request).wait(SECONDS)
    cache.release(request)
    return match.num_tokens


def _bytes_of(cache: PrefixCacheManager, num_ranks: int) -> bytes:
    """All that both tiers hold."""
    kept = [
        part.tobytes() for rank in range(num_ranks) for layer in cache.ranks.kv_views(rank) for part in layer.values()
    ]
    kept += [bytes(segment.view(np.uint8, (segment.num_bytes,))) for segment in cache._movement.client.cpu_segments()]
    return b"".join(kept)


@pytest.mark.processes
@pytest.mark.parametrize("transfer_client", ["inline", "processes"])
def test_no_byte_is_left_in_both_tiers(transfer_client: str) -> None:
    """With two ranks, here and in processes: the blocks of one namespace are zeros then, those of others are whole."""
    config = _config(transfer_client=transfer_client, transfer=TransferConfig(tp_size=2))
    with PrefixCacheManager(config) as cache:
        theirs = _serve(cache, "", np.float32(7.5), 2)
        _serve(cache, "secret", SECRET, 2)
        assert SECRET.tobytes() in _bytes_of(cache, 2)
        report = cache.life.forget_namespace("secret", SECONDS)
        assert (report.num_gpu_blocks, report.num_cpu_blocks, report.num_waiting_blocks) == (NUM_BLOCKS, NUM_BLOCKS, 0)
        assert (report.num_held_blocks, report.num_requests, report.num_stored_objects) == (0, 0, 0)
        assert SECRET.tobytes() not in _bytes_of(cache, 2)
        for rank in range(2):
            for layer in cache.ranks.kv_views(rank):
                assert all((part[theirs[:NUM_BLOCKS]] == 7.5).all() for part in layer.values())
        cache.check_invariants()
        assert (_found(cache, "secret"), _found(cache, "")) == (0, NUM_BLOCKS * SIZE)
        stats = cache.stats()
        assert stats.gpu.num_free == 24 - NUM_BLOCKS and stats.cpu.num_free == 24 - NUM_BLOCKS


@pytest.mark.processes
def test_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    """What a file store has is removed and overwritten, of one namespace alone; it is not found after a restart."""
    storage = StorageConfig(weights_id="w", folder=str(tmp_path), capacity_bytes=2**20, admission="all")
    config = _config(storage=storage, min_prefetch_tokens=1, prefetch_policy="wait_complete")
    with PrefixCacheManager(config) as cache:
        for namespace, value in (("", np.float32(7.5)), ("secret", SECRET)):
            _serve(cache, namespace, value, 1)
        assert cache.storage.flush(SECONDS)
        assert SECRET.tobytes() * 64 in _disk(tmp_path)
        report = cache.life.forget_namespace("secret", SECONDS)
        assert (report.num_stored_objects, report.num_waiting_blocks, report.num_held_blocks) == (NUM_BLOCKS, 0, 0)
        assert report.left == (
            "places in the store's files that were freed before keep their bytes until they are written to again",
        )
        assert SECRET.tobytes() not in _disk(tmp_path)
        assert np.float32(7.5).tobytes() * 64 in _disk(tmp_path)
        cache.reset()
        assert (_found(cache, "secret"), _found(cache, "")) == (0, NUM_BLOCKS * SIZE)
    with PrefixCacheManager(config) as cache:
        assert _found(cache, "secret") == 0


def _disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_a_running_request_goes_on_and_is_wiped_when_it_ends() -> None:
    """It keeps what it has and is given more, publishes nothing, and its blocks are zeros, and free, when it ends."""
    with PrefixCacheManager(_config(transfer_client="inline")) as cache:
        _serve(cache, "secret", SECRET, 1)
        request = Request(request_id="runs", prompt_token_ids=[*_tokens("secret"), 1], namespace="secret")
        match = cache.match(request)
        assert match.num_tokens == NUM_BLOCKS * SIZE
        report = cache.life.forget_namespace("secret", SECONDS)
        assert (report.num_requests, report.num_held_blocks, report.num_waiting_blocks) == (1, 2 * NUM_BLOCKS, 0)
        assert any("held by requests" in each for each in report.left)
        (part, *_), *_ = [list(layer.values()) for layer in cache.ranks.kv_views(0)]
        assert (part[match.block_ids] == SECRET).all()
        more = cache.allocate(request, 3)
        for layer in cache.ranks.kv_views(0):
            for each in layer.values():
                each[more] = SECRET
        request.append_output([5] * 8)
        cache.commit(request, 32)
        assert _found(cache, "secret") == 0
        cache.release(request)
        cache.check_invariants()
        assert SECRET.tobytes() not in _bytes_of(cache, 1)
        assert cache.stats().gpu.num_free == 24


def test_a_namespace_is_forgotten_twice_while_a_request_runs() -> None:
    """The second time there is nothing more to forget, and what the request holds is wiped when it ends."""
    with PrefixCacheManager(_config(transfer_client="inline")) as cache:
        _serve(cache, "secret", SECRET, 1)
        request = Request(request_id="runs", prompt_token_ids=[*_tokens("secret"), 1], namespace="secret")
        cache.match(request)
        for num_blocks in (NUM_BLOCKS, 0):
            report = cache.life.forget_namespace("secret", SECONDS)
            assert (report.num_gpu_blocks, report.num_held_blocks) == (num_blocks, 2 * NUM_BLOCKS)
            cache.check_invariants()
        cache.release(request)
        cache.check_invariants()
        assert SECRET.tobytes() not in _bytes_of(cache, 1)


def test_what_others_have_not_filled_yet_is_named() -> None:
    """A block that another namespace's request has taken, and not written, may hold bytes of before: it is counted, and
    wiped when it is freed."""
    with PrefixCacheManager(_config(transfer_client="inline")) as cache:
        first = Request(request_id="first", prompt_token_ids=_tokens("secret"), namespace="secret")
        cache.match(first)
        (part, *_), *_ = [list(layer.values()) for layer in cache.ranks.kv_views(0)]
        part[cache.allocate(first, 2)] = SECRET
        cache.release(first)
        other = Request(request_id="other", prompt_token_ids=_tokens(""))
        cache.match(other)
        cache.allocate(other, 2)
        report = cache.life.forget_namespace("secret", SECONDS)
        assert (report.num_held_blocks, report.num_waiting_blocks) == (2, 0)
        assert report.left == ("held by requests or callers: 2 blocks, overwritten when they let them go",)
        cache.release(other)
        assert SECRET.tobytes() not in _bytes_of(cache, 1)
        assert cache.stats().gpu.num_free == 24


@pytest.mark.processes
def test_copies_that_are_under_way_are_waited_for() -> None:
    """Right after a release, blocks are still being copied down: the report comes when that has ended, with none."""
    with PrefixCacheManager(_config(transfer_client="processes")) as cache:
        for _ in range(5):
            request = Request(request_id="r", prompt_token_ids=[*_tokens("secret"), 1], namespace="secret")
            cache.match(request)
            cache.allocate(request, NUM_BLOCKS + 1)
            cache.commit(request, NUM_BLOCKS * SIZE)
            cache.release(request)
            report = cache.life.forget_namespace("secret", SECONDS)
            assert (report.num_held_blocks, report.num_waiting_blocks, report.left) == (0, 0, ())


def test_who_needs_blocks_waits_until_they_are_wiped() -> None:
    """With nothing running, a prompt that fits is not refused because blocks of a forgotten namespace are wiped now."""
    model = CacheModel(2, 20, 0)
    model.serve(list(range(40)), stays=False, patient=True, namespace="secret")
    model.forget("secret")
    request = Request(request_id="waits", prompt_token_ids=list(range(40)))
    model.cache.match(request)
    with pytest.raises(OutOfBlocksError) as refused:
        model.cache.allocate(request, 20)
    assert refused.value.missing <= refused.value.coming
    model.client.land_all()
    assert len(model.cache.allocate(request, 20)) == 20
    model.cache.release(request)
    model.finish()


def test_what_is_forgotten_before_it_is_wiped_is_given_to_nobody() -> None:
    """While the ranks are down the blocks are no room for others; when they are back the blocks are wiped, and free."""
    model = CacheModel(2, 20, 0)
    model.serve(list(range(20)), stays=False, patient=True, namespace="secret")
    model.client.up = False
    report = model.cache.life.forget_namespace("secret", 0)
    assert report.num_waiting_blocks == 20  # ten that were cached, and ten that were free, of which nobody knows better
    live = model.must_match([1])
    assert not model.allocate(live, 11)
    assert model.allocate(live, 10)
    model.check()
    model.client.up = True
    model.release(live)
    model.client.land_all()
    assert model.cache.life.forget_namespace("other", 0).num_gpu_blocks == 0
    model.client.land_all()
    model.client.auto = True
    assert model.cache.life.forget_namespace("secret", SECONDS).num_waiting_blocks == 0
    model.finish()


def test_a_closed_cache_forgets_nothing() -> None:
    """It says that it is closed, at once."""
    cache = PrefixCacheManager(_config(transfer_client="inline"))
    cache.close()
    with pytest.raises(ClosedError):
        cache.life.forget_namespace("secret", SECONDS)


def test_what_is_coming_from_a_store_joins_nothing() -> None:
    """A prefetch that is under way when its namespace is forgotten brings nothing; the store is asked to remove all."""
    model = CacheModel(4, 24, 24, min_prefetch_tokens=4, load_policy="always", prefetch_policy="wait_complete")
    store = SimulatedStorage(model.client)
    model.cache.storage.attach(STORE, client=store)
    store.land_all()
    tokens = list(range(41))
    for namespace in ("secret", ""):
        model.serve(tokens, stays=False, patient=True, namespace=namespace)
        model.client.land_all()
        store.land_all()
    assert len(store.objects) == 20
    model.reset()
    request = Request(request_id="queued", prompt_token_ids=tokens, namespace="secret")
    model.cache.prefetch(request)
    store.land()  # the look-up
    assert store.tasks[0].kind is TaskKind.PREFETCH
    model.forget("secret")
    assert (
        model.cache.prefetch(Request(request_id="late", prompt_token_ids=tokens, namespace="secret")).num_cpu_tokens
        == 0
    )
    store.land_all()
    model.client.land_all()
    assert len(store.objects) == 10
    live = model.must_match(tokens, "secret")
    assert model.settle(live) == []
    model.release(live)
    model.finish()


def test_pins_and_sessions_of_a_namespace_end() -> None:
    """An operator's pin holds nothing of it any more, and a session of it is not known any more."""
    with PrefixCacheManager(_config(transfer_client="inline")) as cache:
        request = Request(
            request_id="s", prompt_token_ids=[*_tokens("secret"), 1], namespace="secret", session_id="one"
        )
        cache.match(request)
        cache.allocate(request, NUM_BLOCKS + 1)
        cache.commit(request, NUM_BLOCKS * SIZE)
        cache.release(request)
        assert cache.sessions.retain("one", 60.0, namespace="secret").num_blocks == NUM_BLOCKS
        assert cache.life.forget_namespace("secret", SECONDS).num_waiting_blocks == 0
        assert cache.control.pins() == []
        assert cache.stats().gpu.num_free == 24
        with pytest.raises(RequestError, match="one"):
            cache.sessions.retain("one", 60.0, namespace="secret")


def test_what_may_be_elsewhere_is_named() -> None:
    """The report has a sentence for each place that this cache cannot reach, or that has not answered."""
    with PrefixCacheManager(_config(transfer_client="inline")) as cache:
        assert cache.life.forget_namespace("nobody", SECONDS) == EMPTY
        with pytest.raises(RequestError, match="give the text"):
            cache.life.forget_namespace(3, SECONDS)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="no UTF-8 text"):
            cache.life.forget_namespace("\ud800")
        with pytest.raises(ConfigError, match="timeout_seconds is -1"):
            cache.life.forget_namespace("a", -1)
    model = CacheModel(4, 24, 24)
    store = SimulatedStorage(model.client)
    model.cache.storage.attach(STORE, client=store)
    store.land_all()
    left = model.cache.life.forget_namespace("a", 0).left
    assert "the store has not answered in time; forget the namespace again" in left
    store.land("disk on fire")
    left = model.cache.life.forget_namespace("", 0).left
    assert any(each.startswith("the store: the default namespace has no mark in the names") for each in left)
    store.land_all()
    store.up = False
    assert any("could not be asked in time" in each for each in model.cache.life.forget_namespace("a", 0).left)
    model.cache.storage.detach()
    assert any("none is attached" in each for each in model.cache.life.forget_namespace("a", 0).left)
    model.finish()


def test_a_store_that_comes_back_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is being started again when the namespace is forgotten: the verb waits for it, within its time."""
    model = CacheModel(4, 24, 24)
    store = SimulatedStorage(model.client)
    model.cache.storage.attach(STORE, client=store)
    store.land_all()
    store.up, model.client.auto, asked = False, True, list[TaskKind]()

    def sleep(_: float) -> None:
        asked.extend(task.kind for task in store.tasks)
        store.up = True
        store.land_all()

    monkeypatch.setattr(model.cache._books.clock, "sleep", sleep)
    assert model.cache.life.forget_namespace("a", SECONDS).left == ()
    assert asked == [TaskKind.FORGET]
    model.finish()


def test_a_forget_ends_with_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a report hears that the cache was closed, and is promised nothing."""
    cache = PrefixCacheManager(_config(transfer_client="inline"))
    _serve(cache, "secret", SECRET, 1)
    cache.life.pause(SECONDS)
    monkeypatch.setattr(cache._books.clock, "sleep", lambda _: cache.close())
    with pytest.raises(ClosedError):
        cache.life.forget_namespace("secret", SECONDS)


@pytest.mark.processes
def test_the_command(tmp_path: Path) -> None:
    """`fastdeploy-cache forget` says what has become of it; status 4 where something may be left, and names that."""
    request = Request(request_id="runs", prompt_token_ids=_tokens("secret"), namespace="secret")
    socket = tmp_path / "cache.sock"
    with PrefixCacheManager(_config(transfer_client="inline")) as cache:
        _serve(cache, "secret", SECRET, 1)
        cache.control.open(socket)
        found = f"forgotten: {NUM_BLOCKS} blocks on the GPU, {NUM_BLOCKS} in the CPU tier"
        cache.match(request)
        done = _forget(socket)
        lines = done.stdout.splitlines()
        assert (done.returncode, lines[0]) == (4, found)
        assert lines[-1].startswith("may be left: ") and "held by requests" in lines[-1]
        cache.release(request)
        _serve(cache, "secret", SECRET, 1)
        done = _forget(socket)
        assert (done.returncode, done.stdout) == (0, f"{found}\n")
        assert SECRET.tobytes() not in _bytes_of(cache, 1)
        _serve(cache, "secret", SECRET, 1)
        done = _forget(socket, "-", "secret\n")
        assert (done.returncode, done.stdout) == (0, f"{found}\n"), "the name came by standard input"


def _forget(socket: Path, name: str = "secret", told: str = "") -> subprocess.CompletedProcess[str]:
    command = [*CLI, "forget", name, "--socket", str(socket)]
    return subprocess.run(command, input=told, capture_output=True, text=True, timeout=60, check=False)
