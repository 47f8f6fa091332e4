"""Prefill and decode apart, as FastDeploy's engines call it: two adapters, real processes, real bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from fastdeploy_cache.errors import (
    BlockOwnerError,
    ConfigError,
    PeerError,
    PeerRefusedError,
    RankStartError,
    RequestError,
)
from fastdeploy_cache.ipc.peer_channel import make_keys
from fastdeploy_cache.transfer_manager.kv.memory import KVMemory
from tests.rigs.fastdeploy_engine import PROMPT, Kernel, Task, give_up_v1, launch, new_config
from tests.rigs.needs import need_mooncake, need_nixl
from tests.rigs.storage_servers import free_port

pytestmark = pytest.mark.processes

SECONDS = 20.0
TP_SIZES = [(1, 1), (2, 2), (2, 1), (1, 2)]
WEIGHTS = {"weights_id": "tiny-1"}
New = Callable[..., PrefixCacheManager]


class HeadKernel(Kernel):
    """Every head of every layer and part is another number, so that none can be taken for another."""

    def compute(self, tokens: list[int], table: list[int], first_token: int, num_tokens: int) -> None:
        size = self.manager.cache.config.block_size
        for block in range(first_token // size, num_tokens // size):
            for heads, values in self._heads(tokens, block, table[block]):
                heads[...] = values

    def check(self, tokens: list[int], table: list[int], num_blocks: int, *, first_block: int = 0) -> None:
        for block in range(first_block, num_blocks):
            for heads, values in self._heads(tokens, block, table[block]):
                np.testing.assert_array_equal(heads, np.broadcast_to(values, heads.shape))

    def _heads(self, tokens: list[int], block: int, block_id: int) -> Iterator[tuple[Any, Any]]:
        """Of each rank, layer and part: the block's [heads, tokens, elements], and what each head holds."""
        base = self._value(tokens, block)
        for rank in range(self.manager.cache.config.transfer.tp_size):
            for layer, parts in enumerate(self.manager.cache.ranks.kv_views(rank)):
                for part, name in enumerate(("key", "value")):
                    heads = parts[name][block_id]
                    numbers = np.arange(rank * len(heads), (rank + 1) * len(heads))
                    yield heads, ((base + 100 * layer + 10 * part + numbers) % 65536).astype(np.uint16)[:, None, None]


@pytest.fixture
def new() -> Iterator[New]:
    """Launched adapters by role, tp size and further settings; both books are right at the end, nothing is held."""
    made: list[PrefixCacheManager] = []

    def make(
        role: str, tp_size: int = 1, /, *, theirs: dict[str, Any] | None = None, **extra: Any
    ) -> PrefixCacheManager:
        config = new_config(16, 0, **{"peer": WEIGHTS, **extra})
        for name, value in (theirs or {}).items():
            setattr(config.cache_config, name, value)
        manager = PrefixCacheManager(config, tp_size, role, schedules_ahead=False)
        made.append(manager)
        launch(manager, _suffix(role), tp_size)
        return manager

    yield make
    held = []
    while made:  # pytest keeps `make`, and so the list, until after the check for leaks
        manager = made.pop()
        manager.cache.check_invariants()
        gpu = manager.cache.blocks.view.tier_stats()
        held.append(gpu.num_private + gpu.num_callers + gpu.num_in_flight + gpu.num_protected)
        manager.close()
    assert not any(held)


def _suffix(role: str) -> str:
    return f"{role}{os.getpid()}"


def begin(manager: PrefixCacheManager, task: Task) -> int:
    """Match, and take blocks for the rest of the prompt; the matched tokens."""
    task.block_tables, num_matched, _ = manager.request_match_blocks(task, 4)
    missing = manager.get_required_block_num(len(task.prompt_token_ids), 4) - len(task.block_tables)
    task.block_tables += manager.allocate_gpu_blocks(missing, task.request_id)
    return num_matched


def prefill(manager: PrefixCacheManager, task: Task, first_token: int = 0, chunk: int = 8) -> None:
    """Compute the prompt, step by step, each announced and its layers marked."""
    tokens = list(task.prompt_token_ids)
    kernel, cache = HeadKernel(manager), manager.cache
    for first in range(first_token, len(tokens), chunk):
        end, step = min(first + chunk, len(tokens)), first // chunk + 1
        manager.begin_step(task, end, step)
        kernel.compute(tokens, task.block_tables, first, end)
        for rank in range(cache.config.transfer.tp_size):
            cache.peers.step_progress(rank).mark(step, 2)
        manager.update_cache_blocks(task, 4, end)


def decode(manager: PrefixCacheManager, task: Task, num_matched: int) -> None:
    """The request as a decode instance serves it: what came is right, and the rest is computed."""
    tokens, kernel = list(task.prompt_token_ids), HeadKernel(manager)
    assert begin(manager, task) == num_matched
    kernel.check(tokens, task.block_tables, num_matched // 4)
    kernel.compute(tokens, task.block_tables, num_matched, len(tokens))
    manager.update_cache_blocks(task, 4, len(tokens))
    give_up_v1(manager, task)


@pytest.mark.parametrize(("tp_prefill", "tp_decode"), TP_SIZES)
def test_what_prefill_computes_is_found_by_decode(new: New, tp_prefill: int, tp_decode: int) -> None:
    """v1: each head of each layer arrives where it belongs, whatever the numbers of ranks."""
    sender, receiver = new("prefill", tp_prefill), new("decode", tp_decode)
    task, other = Task("a", PROMPT), Task("a", PROMPT)
    begin(sender, task)
    send = sender.offer_blocks(task)
    receive = receiver.receive_blocks(other, send.offer)
    assert not receive.done, "nothing is computed yet"
    prefill(sender, task)
    give_up_v1(sender, task)
    assert receive.wait(SECONDS), receive.error
    assert send.wait(SECONDS), send.error
    assert receive.num_blocks == 5
    decode(receiver, other, 20)


def test_v0_and_what_decode_has_is_not_sent(new: New) -> None:
    """v0: the blocks are computed at release; of the second prompt only what is new is received."""
    sender, receiver = new("prefill"), new("decode")
    longer = [*PROMPT[:20], *range(500, 510)]
    for name, prompt, num_received in (("a", PROMPT, 5), ("b", longer, 2)):
        task, other, kernel = Task(name, prompt), Task(name, prompt), HeadKernel(sender)
        common, own, _ = sender.request_block_ids(task, 4)
        kernel.check(prompt, common, len(common))
        send = sender.offer_blocks(task)
        receive = receiver.receive_blocks(other, send.offer)
        kernel.compute(prompt, common + own, 4 * len(common), len(prompt))
        task.output_token_ids = [1]
        sender.release_block_ids(task)
        assert receive.wait(SECONDS) and send.wait(SECONDS), (receive.error, send.error)
        assert receive.num_blocks == num_received
        decode(receiver, other, len(prompt) // 4 * 4)


def test_an_announced_step_takes_its_full_blocks_over(new: New) -> None:
    """From begin_step on they are the cache's to free; what they hold is not found before it is computed."""
    sender = new("prefill")
    task = Task("a", PROMPT)
    begin(sender, task)
    send = sender.offer_blocks(task)
    sender.begin_step(task, 10, 1)
    assert task.num_cached_blocks == 2
    with pytest.raises(BlockOwnerError):
        sender.recycle_gpu_blocks(task.block_tables[0])
    with pytest.raises(RequestError, match="computes 23 tokens; it has 22"):
        sender.begin_step(task, 23, 2)
    probe = Task("probe", PROMPT)
    assert sender.request_match_blocks(probe, 4)[1] == 0
    sender.release_block_ids(probe)
    sender.cancel_send(send)
    give_up_v1(sender, task)
    assert not send.wait(SECONDS) and send.reason == "cancelled"
    assert len(sender.gpu_free_block_list) == 16


def test_a_task_that_is_given_up_fails_on_both_sides(new: New) -> None:
    """Prefill releases it half computed: decode hears why, takes nothing for cached, and computes the prompt."""
    sender, receiver = new("prefill"), new("decode")
    task, other = Task("a", PROMPT), Task("a", PROMPT)
    begin(sender, task)
    send = sender.offer_blocks(task)
    receive = receiver.receive_blocks(other, send.offer)
    HeadKernel(sender).compute(PROMPT, task.block_tables, 0, 8)
    sender.update_cache_blocks(task, 4, 8)
    give_up_v1(sender, task)
    assert not receive.wait(SECONDS) and not send.wait(SECONDS)
    assert send.reason == "failed" and "2 of 5 blocks" in str(send.error)
    assert receive.reason == "failed" and "2 of 5 blocks" in str(receive.error)
    decode(receiver, other, 0)


def test_a_task_that_leaves_decode_holds_nothing(new: New) -> None:
    """cancel_receive, before and after the blocks have come: what came is cached, and may be evicted."""
    sender, receiver = new("prefill"), new("decode")
    for name, computes_first in (("a", False), ("b", True)):
        task, other = Task(name, [ord(name), *PROMPT]), Task(name, [ord(name), *PROMPT])
        begin(sender, task)
        send = sender.offer_blocks(task)
        receive = receiver.receive_blocks(other, send.offer)
        if computes_first:
            prefill(sender, task)
            assert receive.wait(SECONDS), receive.error
            assert receiver.cache.blocks.view.tier_stats().num_protected == 5
        receiver.cancel_receive(other)
        assert receive.wait(SECONDS) == computes_first
        give_up_v1(sender, task)
        send.wait(SECONDS)
    assert receiver.free_block_ids(16) == 5


def test_the_messager_is_started_and_found_started(new: New) -> None:
    """launch_cache_messager alone starts all; a plain reader sees the ready signal under its name; handles are live."""
    manager = PrefixCacheManager(new_config(16, peer=WEIGHTS), 2, "decode")
    arguments = (None, 2, [0, 1], "16,1,4,8", "16,1,4,8", "127.0.0.1")
    processes = manager.launch_cache_messager(*arguments, _suffix("decode"), "unused")
    words = np.fromfile(f"/dev/shm/cache_ready_signal.{_suffix('decode')}", np.int32)
    assert words.tolist() == [1, 1]
    assert processes is not None and len({process.pid for process in processes}) == 2
    assert all(p.poll() is None and Path(f"/proc/{p.pid}").exists() for p in processes)
    again = manager.launch_cache_messager(*arguments, _suffix("decode"), "unused")
    assert again is not None and [p.pid for p in again] == [p.pid for p in processes]
    with pytest.raises(ConfigError, match="port 'other', but launched with 'decode"):
        manager.launch_cache_messager(*arguments, "other", "unused")
    manager.close()
    assert not Path(f"/dev/shm/cache_ready_signal.{_suffix('decode')}").exists()
    handles = launch(new("prefill"), _suffix("prefill"))
    assert [process.rank for process in handles] == [0], "launch_cache_manager starts them, too"


def test_a_messager_that_is_late_is_none() -> None:
    """Processes that are not ready in time: None as in the original, an error of the whole launch; nothing is left."""
    manager = PrefixCacheManager(new_config(16, peer=WEIGHTS, transfer={"start_timeout_seconds": 0.001}), 1, "prefill")
    assert manager.launch_cache_messager(None, 1, [0], "", "", "127.0.0.1", _suffix("prefill"), "unused") is None
    assert not Path(f"/dev/shm/cache_ready_signal.{_suffix('prefill')}").exists()
    with pytest.raises(RankStartError, match=r"ranks \[0\] are not ready after 0.001 s"):
        launch(manager, _suffix("prefill"))
    manager.close()


def test_processes_without_kv_arrays_are_not_waited_for(new: New) -> None:
    """Workers make the arrays once they see the ready signal: handles come at once, and are up after attach_kv."""
    manager = new("prefill", transfer={"kv_owner": "worker"})
    processes = manager.launch_cache_messager(None, 1, [0], "", "", "127.0.0.1", _suffix("prefill"), "unused")
    assert processes is not None and [process.poll() for process in processes] == [1]
    layout = manager.cache.config.rank_layout()
    assert layout is not None
    with contextlib.closing(KVMemory.create(layout, 16)) as kv:
        manager.cache.ranks.attach_kv(0, kv.handle())
        assert manager.cache.peers.wait_ready(SECONDS)
        assert [process.poll() for process in processes] == [None]
        manager.cache.ranks.kv_lost(0)


@pytest.mark.parametrize("link", ["nixl", "mooncake"])
def test_rdma_by_a_library_with_control_ports(new: New, tmp_path: Path, link: str) -> None:
    """cache_transfer_protocol "rdma" over TCP on loopback: control messages by local_rdma_comm_ports, with keys."""
    if link == "nixl":
        need_nixl()
    else:
        need_mooncake()
    keys = make_keys(tmp_path / "keys")
    (tmp_path / "keys" / "trusted" / "self.key").write_bytes(keys.read_bytes())
    peer = {**WEIGHTS, "link": link, "keys_folder": str(tmp_path / "keys")}
    theirs = {"cache_transfer_protocol": "rdma"}
    sender = new("prefill", peer=peer, theirs=theirs | {"local_rdma_comm_ports": [free_port()]})
    receiver = new("decode", peer=peer, theirs=theirs | {"local_rdma_comm_ports": [free_port()]})
    assert sender.cache.config.peer is not None and sender.cache.config.peer.listen.startswith("tcp://127.0.0.1:")
    task, other = Task("a", PROMPT), Task("a", PROMPT)
    begin(sender, task)
    send = sender.offer_blocks(task)
    receive = receiver.receive_blocks(other, send.offer)
    prefill(sender, task)
    give_up_v1(sender, task)
    assert receive.wait(SECONDS) and send.wait(SECONDS), (receive.error, send.error)
    decode(receiver, other, 20)


def test_roles_that_do_not_fit_say_so(new: New) -> None:
    """Each verb on the wrong side, before the launch, without peers; an offer that is none, or of another prompt."""
    sender, receiver, mixed = new("prefill"), new("decode"), new("mixed", peer=None)
    task = Task("a", PROMPT)
    with pytest.raises(PeerRefusedError, match="role of this instance is 'prefill'"):
        sender.receive_blocks(task, _offer_of(sender, Task("b", PROMPT)))
    begin(receiver, task)
    with pytest.raises(PeerRefusedError, match="role of this instance is 'decode'"):
        receiver.offer_blocks(task)
    give_up_v1(receiver, task)
    with pytest.raises(PeerRefusedError, match="no offer"):
        receiver.receive_blocks(task, b"not one")
    with pytest.raises(PeerRefusedError, match="None"):
        receiver.receive_blocks(task, cast(bytes, None))
    with pytest.raises(PeerRefusedError, match="another prompt"):
        receiver.receive_blocks(Task("c", [7, *PROMPT]), _offer_of(sender, Task("c", PROMPT)))
    with pytest.raises(KeyError):
        sender.offer_blocks(task)
    with pytest.raises(ConfigError, match="'mixed': no blocks go between"):
        mixed.offer_blocks(task)
    with pytest.raises(ConfigError, match="'mixed': no blocks go between"):
        mixed.launch_cache_messager(None, 1, [0], "", "", "127.0.0.1", _suffix("mixed"), "unused")
    unlaunched = PrefixCacheManager(new_config(16, peer=WEIGHTS), 1, "decode")
    with pytest.raises(ConfigError, match="call launch_cache_manager first"):
        unlaunched.receive_blocks(task, b"")
    unlaunched.close()


def _offer_of(manager: PrefixCacheManager, task: Task) -> bytes:
    """An offer that nobody reads any more."""
    begin(manager, task)
    send = manager.offer_blocks(task)
    manager.cancel_send(send)
    give_up_v1(manager, task)
    assert not send.wait(SECONDS) and send.reason == "cancelled"
    return send.offer


def test_a_mixed_instance_with_a_table_may_do_either(new: New) -> None:
    """splitwise_role "mixed" and fastdeploy_cache["peer"]: two such instances send to each other."""
    one, two = new("mixed"), new("decode")
    task, other = Task("a", PROMPT), Task("a", PROMPT)
    begin(one, task)
    send = one.offer_blocks(task)
    with pytest.raises(PeerRefusedError, match="this instance's own"):
        one.receive_blocks(Task("b", PROMPT), send.offer)
    receive = two.receive_blocks(other, send.offer)
    prefill(one, task)
    give_up_v1(one, task)
    assert receive.wait(SECONDS) and send.wait(SECONDS), (receive.error, send.error)
    decode(two, other, 20)


def test_a_paused_instance_refuses_for_now(new: New) -> None:
    """control("pause"): no offer until "resume"."""
    sender = new("prefill")
    task = Task("a", PROMPT)
    begin(sender, task)
    assert sender.control("pause")[0] == 200
    with pytest.raises(PeerError, match="not running"):
        sender.offer_blocks(task)
    assert sender.control("resume")[0] == 200
    send = sender.offer_blocks(task)
    give_up_v1(sender, task)
    assert not send.wait(SECONDS) and send.reason == "failed"


def test_a_sleeping_instance_refuses_for_now(new: New) -> None:
    """control("sleep"): neither side takes anything up until "wakeup"; the same offer is good then."""
    sender, receiver = new("prefill"), new("decode")
    task, other = Task("a", PROMPT), Task("a", PROMPT)
    begin(sender, task)
    send = sender.offer_blocks(task)
    assert receiver.control("sleep")[0] == 200
    with pytest.raises(PeerError, match="not running") as refusal:
        receiver.receive_blocks(other, send.offer)
    assert not isinstance(refusal.value, PeerRefusedError)
    assert receiver.control("wakeup")[0] == 200
    receive = receiver.receive_blocks(other, send.offer)
    prefill(sender, task)
    give_up_v1(sender, task)
    assert receive.wait(SECONDS) and send.wait(SECONDS), (receive.error, send.error)
    decode(receiver, other, 20)
