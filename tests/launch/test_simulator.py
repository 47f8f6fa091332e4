"""The simulator: traces are read or refused exactly, and replayed hit rates are those of naive models."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.simulator.bound import Clairvoyant, infinite_hit_rate
from fastdeploy_cache.launch.simulator.replay import Replay, Replayed, StorePlan
from fastdeploy_cache.launch.simulator.report import tokens_text
from fastdeploy_cache.launch.simulator.store import SimulatedStore
from fastdeploy_cache.launch.simulator.trace import Trace, TraceError, read_trace
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask
from tests.rigs.traces import line, write


def random_trace(path: Path, seed: int, num_requests: int = 200) -> Path:
    """Conversations that grow, part and start anew; ids name a block with all before it, as in real traces."""
    rng = random.Random(seed)
    numbers: dict[tuple[int, ...], int] = {}
    talks: list[list[int]] = [[]]
    lines = []
    for i in range(num_requests):
        talk = list(rng.choice(talks)) if rng.random() < 0.8 else []
        talk = talk[: rng.randint(0, len(talk))] if rng.random() < 0.3 else talk
        new = rng.randint(0 if talk else 1, 4)  # some prompts end inside an earlier one
        talk += [rng.randint(0, 10**6) for _ in range(new)]
        talks = [*talks[-8:], talk]
        ids = [numbers.setdefault(tuple(talk[: n + 1]), len(numbers)) for n in range(len(talk))]
        lines.append(line(i, ids, 4 * len(ids)))
    return write(path, lines)


def replay(trace: Trace, policy: str | Clairvoyant, gpu: int, cpu: int = 0) -> float:
    hear = policy.hear if isinstance(policy, Clairvoyant) else lambda number, request: None
    return Replay(trace, gpu, cpu, policy).run(hear).token_hit_rate


# -- reading


def test_ids_become_blocks_and_only_full_ones_count(tmp_path: Path) -> None:
    """A last id that is partly filled is left out; equal ids become equal blocks, however large they are."""
    path = write(tmp_path / "t", [line(0, [2**60, 7], 7), "", line(1, [2**60, 7, 9], 12)])
    trace = read_trace(path, 4, 4)
    assert [request.blocks.tolist() for request in trace.requests] == [[0], [0, 1, 2]]
    assert (trace.num_tokens, trace.num_distinct_blocks, trace.requests[1].seconds) == (19, 3, 1.0)


def test_a_block_size_may_divide_the_traces(tmp_path: Path) -> None:
    """Each id is split; of a partly filled one the full parts count."""
    path = write(tmp_path / "t", [line(0, [5, 6], 7)])
    assert read_trace(path, 4, 2).requests[0].blocks.tolist() == [0, 1, 2]
    with pytest.raises(TraceError, match="--block-size 3 does not divide --trace-block-size 4"):
        read_trace(path, 4, 3)


def test_compressed_or_not_is_the_same(tmp_path: Path) -> None:
    """By content, not by name; a torn file is an error, not a shorter trace."""
    plain = random_trace(tmp_path / "plain.gz", 1)
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    a, b = (read_trace(path, 4, 4) for path in (plain, packed))
    assert [r.blocks.tolist() for r in a.requests] == [r.blocks.tolist() for r in b.requests]
    packed.write_bytes(packed.read_bytes()[:-300])
    with pytest.raises(TraceError, match="cannot read trace"):
        read_trace(packed, 4, 4)


BAD = {
    "not JSON": "{",
    "a field is missing": '{"timestamp": 5000, "input_length": 4}',
    "no list": '{"timestamp": 5000, "input_length": 4, "hash_ids": 3}',
    "no integers": '{"timestamp": 5000, "input_length": 4, "hash_ids": ["x"]}',
    "backwards": line(0.5, [1]),
    "no tokens": line(5, [], 0),
    "too many ids": line(5, [1, 2, 3], 4),
    "no time": '{"timestamp": null, "input_length": 4, "hash_ids": [1]}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path: Path, name: str) -> None:
    """Line number and reason; with skip_bad the rest is read as if it were not there."""
    path = write(tmp_path / "t", [line(1, [1]), BAD[name], line(2, [1, 2])])
    with pytest.raises(TraceError, match=r"t, line 2: \S.*; --skip-bad leaves such lines out"):
        read_trace(path, 4, 4)
    trace = read_trace(path, 4, 4, skip_bad=True)
    assert (len(trace.requests), trace.num_skipped_lines) == (2, 1)


def test_blank_lines_count_and_time_may_begin_anywhere(tmp_path: Path) -> None:
    """The number is that of the line in the file; the first timestamp may be negative."""
    path = write(tmp_path / "t", ["", line(-5, [1]), "", "{"])
    with pytest.raises(TraceError, match="t, line 4: "):
        read_trace(path, 4, 4)
    assert len(read_trace(path, 4, 4, skip_bad=True).requests) == 1
    nested = write(tmp_path / "n", ["[" * 100_000])
    with pytest.raises(TraceError, match="n, line 1: "):
        read_trace(nested, 4, 4)


def test_no_requests_or_no_file_is_an_error(tmp_path: Path) -> None:
    """With what was found."""
    with pytest.raises(TraceError, match="has no requests"):
        read_trace(write(tmp_path / "empty", [""]), 4, 4)
    with pytest.raises(TraceError, match=r"cannot read trace .*missing"):
        read_trace(tmp_path / "missing", 4, 4)


# -- replaying


def naive_lru(trace: Trace, num_blocks: int) -> float:
    """Leaf-LRU over single blocks, by hand: each request touches its blocks from last to first."""
    order: list[int] = []  # least recently used first
    num_hits = 0
    for request in trace.requests:
        blocks = request.blocks.tolist()
        hits = next((i for i, block in enumerate(blocks) if block not in order), len(blocks))
        hits = min(hits, (request.num_tokens - 1) // trace.block_size)  # one token is left to compute
        num_hits += hits
        order = [block for block in order if block not in blocks]
        order = order[max(0, len(order) + len(blocks) - num_blocks) :] + blocks[::-1]
    return num_hits * trace.block_size / trace.num_tokens


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_blocks", [60, 90, 150])
def test_lru_hits_what_a_naive_lru_hits(tmp_path: Path, seed: int, num_blocks: int) -> None:
    """Block for block, with prompts that end at a block border."""
    trace = read_trace(random_trace(tmp_path / "t", seed), 4, 4)
    assert max(len(request.blocks) for request in trace.requests) <= num_blocks
    assert replay(trace, "lru", num_blocks) == pytest.approx(naive_lru(trace, num_blocks))


def best_possible(trace: Trace, num_blocks: int) -> int:
    """The most blocks that any sequence of evictions can hit: all of them are tried."""
    requests = [tuple(request.blocks.tolist()) for request in trace.requests]
    parents = {b: a for blocks in requests for a, b in itertools.pairwise(blocks)}
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for blocks in requests:
        following: dict[frozenset[int], int] = {}
        for cached, hits in states.items():
            n = next((i for i, block in enumerate(blocks) if block not in cached), len(blocks))
            others = cached - set(blocks)
            for size in range(len(others) + 1):
                for kept in itertools.combinations(sorted(others), size):
                    whole = frozenset(kept) | set(blocks)
                    closed = all(b not in parents or parents[b] in whole for b in whole)
                    if len(whole) + 1 <= num_blocks and closed:  # one for the rest of the prompt
                        following[whole] = max(following.get(whole, 0), hits + n)
        states = following
    return max(states.values())


@pytest.mark.parametrize("seed", range(6))
def test_the_clairvoyant_bound_is_the_best_there_is(tmp_path: Path, seed: int) -> None:
    """Against an exhaustive search on small trees; no policy exceeds it."""
    rng = random.Random(seed)
    tree = [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [5], [5, 6], [5, 7], [8], [8, 9]]
    lines = [line(i, ids, 4 * len(ids) + 1) for i in range(14) for ids in [rng.choice(tree)]]
    trace = read_trace(write(tmp_path / "t", lines), 4, 4)
    for num_blocks in (4, 5, 7):
        best = best_possible(trace, num_blocks) * 4 / trace.num_tokens
        assert replay(trace, Clairvoyant(trace, num_blocks), num_blocks) == pytest.approx(best)
        assert all(replay(trace, policy, num_blocks) <= best + 1e-9 for policy in ("lru", "lfu", "reuse"))


def test_the_bound_holds_beside_prompts_that_cannot_fit(tmp_path: Path) -> None:
    """They are misses for every policy: a bound that kept blocks for them would not be one."""
    for seed in range(20):
        rng = random.Random(seed)
        tree = [[0], [0, 1], [0, 2, 3], [4], [4, 5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16]]
        lines = [line(i, ids, 4 * len(ids) + 1) for i in range(60) for ids in [rng.choice(tree)]]
        trace = read_trace(write(tmp_path / "t", lines), 4, 4)
        bound = replay(trace, Clairvoyant(trace, 5), 5)
        assert all(replay(trace, policy, 5) <= bound + 1e-9 for policy in ("lru", "fifo", "lfu", "slru"))


def test_the_infinite_cache_and_a_large_one_agree(tmp_path: Path) -> None:
    """Where nothing has to go every policy hits the same; a prompt that ends at a border computes its last block."""
    path = tmp_path / "t"
    lines = [line(i, ids, 4 * len(ids) + 1) for i, ids in enumerate([[1, 2], [1, 2, 3], [4], [1, 2]])]
    trace = read_trace(write(path, lines), 4, 4)
    assert replay(trace, "lru", 50) == infinite_hit_rate(trace) == pytest.approx(16 / 36)
    trace = read_trace(random_trace(path, 5), 4, 4)
    assert replay(trace, "lru", 5000) == pytest.approx(infinite_hit_rate(trace))


def test_two_tiers_hit_what_one_large_one_does(tmp_path: Path) -> None:
    """With copies of everything in the CPU tier its size decides; the parts add up, and traffic is counted."""
    trace = read_trace(random_trace(tmp_path / "t", 9), 4, 4)
    assert max(len(request.blocks) for request in trace.requests) < 40
    found = Replay(trace, 40, 4000).run(lambda number, request: None)
    assert found.token_hit_rate == pytest.approx(replay(trace, "lru", 4000))
    assert found.cpu_token_hit_rate > 0
    assert found.gpu_token_hit_rate + found.cpu_token_hit_rate == pytest.approx(found.token_hit_rate)
    assert found.swapped_in_blocks * 4 == round(found.cpu_token_hit_rate * trace.num_tokens)
    assert found.swapped_out_blocks >= trace.num_distinct_blocks - 40


NO_LIMIT = 10_000


def replay_stored(trace: Trace, cpu: int, **storage: Any) -> Replayed:
    """40 GPU blocks, and a store that takes all that it is offered unless told otherwise."""
    store = StorePlan(**{"num_blocks": NO_LIMIT, "admission": "all"} | storage)
    replay = Replay(trace, 40, cpu, storage=store)
    found = replay.run(lambda number, request: None)
    replay.cache.check_invariants()
    return found


def returning_trace(path: Path) -> Path:
    """Sixty prompts that come again and again, of blocks so large that even one is worth asking storage for."""
    rng = random.Random(1)
    prompts = [[0, *range(10 * i + 1, 10 * i + rng.randint(2, 8))] for i in range(60)]
    return write(path, [line(i, ids, 512 * len(ids) + 1) for i in range(300) for ids in [rng.choice(prompts)]])


@pytest.fixture
def large_blocks(tmp_path: Path) -> Trace:
    return read_trace(returning_trace(tmp_path / "t"), 512, 512)


def test_a_large_store_hits_all_that_was_ever_computed(large_blocks: Trace) -> None:
    """As a cache that never evicts; the parts of the tiers add up, and each block is written once."""
    found = replay_stored(large_blocks, cpu=200)
    assert found.token_hit_rate == pytest.approx(infinite_hit_rate(large_blocks))
    assert found.storage_token_hit_rate > 0
    parts = found.gpu_token_hit_rate + found.cpu_token_hit_rate + found.storage_token_hit_rate
    assert parts == pytest.approx(found.token_hit_rate)
    assert found.stored_blocks == large_blocks.num_distinct_blocks and not found.storage_evicted_blocks
    assert found.fetched_blocks * 512 >= round(found.storage_token_hit_rate * large_blocks.num_tokens)


def test_a_small_store_hits_less(large_blocks: Trace) -> None:
    """It evicts what it was given before, and still adds to what GPU and CPU hit alone."""
    none, small, large = (replay_stored(large_blocks, cpu=60, num_blocks=n) for n in (0, 200, NO_LIMIT))
    assert (none.storage_blocks, none.storage_token_hit_rate, none.stored_blocks) == (0, 0, 0)
    assert none.token_hit_rate < small.token_hit_rate < large.token_hit_rate
    assert small.storage_evicted_blocks > 0 == large.storage_evicted_blocks


def test_a_store_that_takes_what_is_offered_twice(large_blocks: Trace) -> None:
    """It writes less, and hits less, as a second use comes later; `write_back` writes what leaves the CPU tier."""
    everything = replay_stored(large_blocks, cpu=60)
    second = replay_stored(large_blocks, cpu=60, admission="second_use")
    back = replay_stored(large_blocks, cpu=60, write_policy="write_back")
    assert 0 < second.stored_blocks < everything.stored_blocks
    assert 0 < second.storage_token_hit_rate < everything.storage_token_hit_rate
    assert 0 < back.stored_blocks <= everything.stored_blocks


def test_of_a_full_store_the_end_of_the_oldest_chain_goes() -> None:
    """What is read or written again is the youngest; what does not fit at all is not taken."""
    store, answers = SimulatedStore(4, "all"), list[int]()
    store.start(lambda result: answers.append(result.num_blocks), lambda: None)

    def ask(kind: TaskKind, names: str) -> int:
        hashes, none = b"".join(name.encode() * HASH_BYTES for name in names), np.empty(0, np.int32)
        ids = np.arange(len(names), dtype=np.int32)
        store.submit(
            TransferTask(task_id=1, kind=kind, source_ids=ids, destination_ids=none, deadline=0.0, hashes=hashes)
        )
        return answers.pop()

    assert [ask(TaskKind.WRITE, "ab"), ask(TaskKind.WRITE, "cd"), ask(TaskKind.PREFETCH, "ab")] == [2, 2, 2]
    assert ask(TaskKind.WRITE, "e") == 1
    assert [ask(TaskKind.LOOKUP, names) for names in ("ab", "c", "d", "e", "ax")] == [2, 1, 0, 1, 1]
    assert ask(TaskKind.WRITE, "fghijk") == 4 and ask(TaskKind.LOOKUP, "fghijk") == 4


def test_prompts_that_cannot_fit_are_misses_and_counted(tmp_path: Path) -> None:
    """They take nothing from the others."""
    trace = read_trace(write(tmp_path / "t", [line(0, [1]), line(1, [2, 3, 4]), line(2, [1], 4)]), 4, 2)
    found = Replay(trace, 3, 0).run(lambda number, request: None)
    assert found.too_long_requests == 1
    assert found.token_hit_rate == pytest.approx(2 / 20)


# -- the program


def test_the_program_prints_writes_and_draws(tmp_path: Path) -> None:
    """Every capacity under every policy; JSON to a file; the picture is a PNG."""
    trace = random_trace(tmp_path / "t", 3)
    options = ["--trace-block-size", "4", "--gpu-blocks", "60,50%", "--cpu-blocks", "0", "--cpu-blocks", "100"]
    files = ["--json", str(tmp_path / "j"), "--plot", str(tmp_path / "p.png")]
    result = CliRunner().invoke(app, ["simulate", str(trace), *options, "--policy", "lru,reuse", *files])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "j").read_text())
    half = found["distinct_blocks"] // 2
    assert [(r["gpu_blocks"], r["cpu_blocks"], r["policy"]) for r in found["results"]] == [
        (gpu, cpu, policy) for gpu in (60, half) for cpu in (0, 100) for policy in ("lru", "reuse")
    ]
    for row in found["results"]:
        (bound,) = (b for b in found["bounds"] if b["blocks"] == row["gpu_blocks"] + row["cpu_blocks"])
        assert 0 < row["token_hit_rate"] <= bound["clairvoyant_token_hit_rate"] <= found["infinite_token_hit_rate"]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "reuse" in result.output


def test_small_traces_have_a_number_of_tokens_too() -> None:
    """Exact below ten thousand, then in thousands and millions."""
    said = [tokens_text(number) for number in (1, 9_999, 10_000, 230_800, 999_500, 12_345_678)]
    assert said == [f"{number} tokens" for number in ("1", "9999", "10 k", "231 k", "1.0 M", "12.3 M")]


def test_sizes_in_bytes_and_seconds_saved(tmp_path: Path) -> None:
    """By the layout of a configuration a size is as many blocks as fit; with a speed each line says what it saves."""
    trace = random_trace(tmp_path / "t", 3, num_requests=40)
    config = tmp_path / "cache.toml"
    config.write_text('num_gpu_blocks = 1\n[layout]\nnum_layers = 2\nnum_kv_heads = 1\nhead_dim = 8\ndtype = "int8"\n')
    block_bytes = 2 * 2 * 4 * 8  # layers, keys and values, tokens, elements
    options = ["--trace-block-size", "4", "--config", str(config), "--prefill-tokens-per-second", "50"]
    sizes = ["--gpu-blocks", f"{40 * block_bytes / 1000}KB", "--no-bound", "--json", str(tmp_path / "j")]
    result = CliRunner().invoke(app, ["simulate", str(trace), *options, *sizes])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "j").read_text())
    (row,) = found["results"]
    assert row["gpu_blocks"] == 40
    assert row["saved_seconds"] == pytest.approx(row["token_hit_rate"] * found["tokens"] / 50) and row["saved_seconds"]
    assert "saved" in result.output


def test_the_program_with_a_store(tmp_path: Path) -> None:
    """Each size of the store beside each of the CPU tier, its hits in a column of their own; all of it is drawn."""
    trace = returning_trace(tmp_path / "t")
    sizes = ["--gpu-blocks", "60", "--cpu-blocks", "60,100", "--storage-blocks", "0,200%", "--storage-admission", "all"]
    files = ["--json", str(tmp_path / "j"), "--plot", str(tmp_path / "p.svg")]
    result = CliRunner().invoke(app, ["simulate", str(trace), *sizes, "--storage-write-policy", "write_back", *files])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "j").read_text())
    double = found["distinct_blocks"] * 2
    assert [(r["cpu_blocks"], r["storage_blocks"]) for r in found["results"]] == [
        (cpu, storage) for cpu in (60, 100) for storage in (0, double)
    ]
    without, with_store = found["results"][:2]
    assert 0 == without["storage_token_hit_rate"] < with_store["storage_token_hit_rate"]
    assert without["token_hit_rate"] < with_store["token_hit_rate"] <= found["infinite_token_hit_rate"] + 1e-9
    assert f"{with_store['storage_token_hit_rate']:.2%}" in result.output and "fetched" in result.output
    assert "storage blocks" in (tmp_path / "p.svg").read_text()


def test_a_missing_plot_library_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the trace is so much as read: there is none here."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    wanted = ["--gpu-blocks", "9", "--plot", str(tmp_path / "p.png")]
    result = CliRunner().invoke(app, ["simulate", str(tmp_path / "no trace"), *wanted])
    assert "--plot needs matplotlib" in str(result.exception)


def test_json_on_standard_output_is_alone_there(tmp_path: Path) -> None:
    """So that it can be piped; the table goes to standard error."""
    trace = random_trace(tmp_path / "t", 3, num_requests=20)
    command = ["simulate", str(trace), "--trace-block-size", "4", "--gpu-blocks", "40", "--json", "-", "--no-bound"]
    result = CliRunner().invoke(app, command)
    assert [row["policy"] for row in json.loads(result.stdout)["results"]] == ["lru"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu-blocks", "40", "--policy", "belady"], "unknown policy 'belady'; the policies are lru, fifo, lfu"),
        (["--gpu-blocks", "many"], "'many' is no number of blocks"),
        (["--gpu-blocks", "0"], "0 makes 0 blocks; use at least 1"),
        (["--gpu-blocks", "0.001%"], "makes 0 blocks"),
        (["--gpu-blocks", "9", "--json", "/nowhere/j"], "cannot write /nowhere/j: its folder does not exist"),
        (["--gpu-blocks", "9", "--block-size", "3"], "does not divide"),
        (["--gpu-blocks", "inf%"], "'inf%' is no number of blocks"),
        (["--gpu-blocks", ","], "no number of blocks was given"),
        (["--gpu-blocks", "40", "--policy", ","], "no policy was given"),
        (["--gpu-blocks", "9", "--storage-blocks", "9"], "beside --storage-blocks give --cpu-blocks above 0"),
        (["--gpu-blocks", "9", "--storage-admission", "priority"], "use one of second_use, all"),
        (["--gpu-blocks", "9", "--json", "/tmp"], "cannot write /tmp: it is a folder"),
        (["--gpu-blocks", "9", "--plot", "/tmp/p.xyz"], "cannot draw /tmp/p.xyz; end its name in .png or .svg"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: list[str], words: str) -> None:
    """One clear error each."""
    trace = random_trace(tmp_path / "t", 3, num_requests=20)
    result = CliRunner().invoke(app, ["simulate", str(trace), "--trace-block-size", "4", *options])
    assert result.exit_code == 1
    assert words in str(result.exception)
