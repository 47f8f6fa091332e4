"""The lane of a real engine, as far as it can be seen without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.engines import sglang_lane, vllm_lane
from fastdeploy_cache.launch.engines.hf_folder import write_hf_folder
from fastdeploy_cache.launch.engines.made_up_model import write_adapter, write_made_up_model, write_mla_model
from fastdeploy_cache.launch.engines.report import Line, line_of
from fastdeploy_cache.launch.engines.results import Passed, Served, StageResult
from fastdeploy_cache.launch.engines.vllm_cases import http_cases, run_cases
from fastdeploy_cache.launch.engines.vllm_loop import VLLMLoop
from fastdeploy_cache.launch.engines.vllm_plan import Pass, StagePlan, pass_over
from fastdeploy_cache.launch.engines.vllm_server import counter_of
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles, ModelSpec
from tests.rigs.file_rig import Rig, space_of

SPEC = ModelSpec(
    num_layers=1,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_size=6,
    vocab_size=10,
    context_length=64,
    rope_theta=10_000.0,
    rms_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)


def test_a_model_becomes_a_hugging_face_folder(tmp_path: Path) -> None:
    """Joined rows are parted again, and those of a head that rotate together stand half a head apart."""
    load_file = pytest.importorskip("safetensors.numpy", reason="needs safetensors").load_file
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers, of the extra demo")
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return rng.random(shape, np.float32)

    layer = {"attn_norm": weight(8), "qkv": weight(16, 8), "attn_output": weight(8, 8), "ffn_norm": weight(8)}
    layer |= {"gate_up": weight(12, 8), "ffn_down": weight(8, 6)}
    tensors = {f"0.{name}": value for name, value in layer.items()}
    tensors |= {"embedding": weight(10, 8), "final_norm": weight(8)}
    vocab = ["<|im_start|>", "<|im_end|>", "Ċ", "Ġ", "a", "b", "ab", "c", "d", "e"]
    files = ModelFiles(
        spec=SPEC, tensors=tensors, vocab=vocab, merges=["a b"], token_types=[3, 3] + 8 * [1],
        chat_template="{{ messages }}", digest="",
    )  # fmt: skip
    write_hf_folder(tmp_path / "model", files)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_key_value_heads"] == 1
    found = load_file(tmp_path / "model" / "model.safetensors")
    attention = "model.layers.0.self_attn."
    assert np.array_equal(found[f"{attention}q_proj.weight"], layer["qkv"][[0, 2, 1, 3, 4, 6, 5, 7]])
    assert np.array_equal(found[f"{attention}k_proj.weight"], layer["qkv"][[8, 10, 9, 11]])
    assert np.array_equal(found[f"{attention}v_proj.weight"], layer["qkv"][12:])
    assert np.array_equal(found["model.layers.0.mlp.up_proj.weight"], layer["gate_up"][6:])
    assert len(found) == 11
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab c").ids == [0, 6, 3, 7]
    assert tokenizer.decode([6, 3, 7]) == "ab c"


def test_a_made_up_model_and_its_adapter_are_folders_for_vllm(tmp_path: Path) -> None:
    """Every weight that the configuration asks for, in its shape, also with a latent instead of keys and values; an
    adapter has what it adds to keys and values."""
    load_file = pytest.importorskip("safetensors.numpy", reason="needs safetensors").load_file
    write_made_up_model(tmp_path / "model", SPEC)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert len(found) == 2 + 9 * SPEC.num_layers
    assert found["model.layers.0.self_attn.k_proj.weight"].shape == (4, 8)
    assert found["model.layers.0.mlp.down_proj.weight"].shape == (8, 6)
    assert all(np.isfinite(weight).all() for weight in found.values())
    write_mla_model(tmp_path / "mla", SPEC)
    latent = load_file(tmp_path / "mla" / "model.safetensors")
    assert latent["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (512 + 64, 8)
    assert latent["model.layers.0.self_attn.kv_b_proj.weight"].shape == (2 * (4 + 4), 512)
    assert np.any(latent["lm_head.weight"]), (
        "vLLM takes embeddings of this architecture for untied, and zeros for a head"
    )
    assert json.loads((tmp_path / "mla" / "config.json").read_text())["tie_word_embeddings"] is False
    write_adapter(tmp_path / "adapter", SPEC)
    added = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    up = added["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"]
    down = added["base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"]
    assert (up @ down).shape == (4, 8) and np.abs(up @ down).max() > 0


def _line(run: str, **changed: Any) -> Line:
    given = {
        "num_requests": 4, "num_equal": 4, "num_prompt_tokens": 100, "num_cached_tokens": 90, "hit_tokens": (0, 90, 0),
        "num_kills": 1, **changed,
    }  # fmt: skip
    return Line(run=run, median_seconds=0.1, longest_seconds=0.2, cpu_seconds=1.0, **given)


RUNS = {
    "with this cache, pass 2": {},
    "ranks killed, pass 2": {"num_cached_tokens": 0, "hit_tokens": (0, 0, 0)},
    "ranks back again, pass 2": {},
    "after a restart, from disk": {"hit_tokens": (0, 0, 90)},
    "after a sudden end, from disk": {"num_cached_tokens": 40, "hit_tokens": (0, 0, 40), "num_stored_tokens": 80},
}


@pytest.mark.parametrize(
    ("run", "changed", "finding"),
    [
        ("ranks killed, pass 2", {}, None),
        ("ranks killed, pass 2", {"num_equal": 3}, "1 answers differ"),
        ("with this cache, pass 2", {"hit_tokens": (4, 75, 0), "num_cached_tokens": 79}, "only 79 tokens came from"),
        ("with this cache, pass 2", {"hit_tokens": (0, 89, 0)}, "vLLM counts 90 cached tokens, we (0, 89, 0)"),
        ("after a restart, from disk", {"hit_tokens": (0, 0, 0), "num_cached_tokens": 0}, "only 0 tokens came from"),
        ("ranks killed, pass 2", {"num_kills": 0}, "no rank was"),
        ("ranks back again, pass 2", {"hit_tokens": (0, 49, 0)}, "only 49 tokens came from the cache"),
        ("after a sudden end, from disk", {"hit_tokens": (0, 30, 39)}, "only 39 tokens came from disk, of 80"),
        ("after a sudden end, from disk", {"num_stored_tokens": 0}, "nothing was on disk"),
    ],
)
def test_what_the_lane_finds_fault_with(run: str, changed: dict[str, Any], finding: str | None) -> None:
    """An answer that differs, a cache that is not hit, also after kills and a sudden end, counts that differ, and a
    kill that reached nobody are named."""
    lines = [_line(each, **{**given, **(changed if each == run else {})}) for each, given in RUNS.items()]
    found = vllm_lane._findings(lines)
    assert len(found) == (finding is not None)
    assert not found or (found[0].startswith(run.partition(",")[0]) and finding in found[0])


SGLANG_RUNS = {
    "with HiCache over our files, pass 2": {"hit_tokens": (0, 40, 50)},
    "after a restart, from disk": {"hit_tokens": (0, 0, 80)},
    "storage process killed, pass 2": {"num_cached_tokens": 0, "hit_tokens": (0, 0, 0)},
    **{
        f"{model}{run}": {"hit_tokens": (0, 80, 0)}
        for model in ("", "hybrid: ")
        for run in (
            "with our linker, pass 2",
            "with our linker, pass 3",
            "linker, after a restart, from disk, pass 1",
            "linker, ranks killed, pass 2",
        )
    },
}


@pytest.mark.parametrize(
    ("run", "changed", "finding"),
    [
        ("after a restart, from disk", {}, None),
        ("after a restart, from disk", {"num_equal": 2}, "2 answers differ"),
        ("after a restart, from disk", {"hit_tokens": (0, 11, 79)}, "only 79 tokens came from storage"),
        ("with HiCache over our files, pass 2", {"hit_tokens": (0, 41, 49)}, "only 49 tokens came from storage"),
        ("storage process killed, pass 2", {"num_kills": 0}, "no process was killed"),
        ("with our linker, pass 3", {"hit_tokens": (0, 79, 50)}, "only 79 tokens came from the CPU tier"),
        ("hybrid: linker, after a restart, from disk, pass 1", {"hit_tokens": (0, 0, 90)}, "only 0 tokens came from"),
        ("hybrid: linker, ranks killed, pass 2", {"num_kills": 0}, "no process was killed"),
        ("hybrid: with our linker, pass 2", {"num_equal": 1}, "3 answers differ"),
    ],
)
def test_what_sglang_s_lane_finds_fault_with(run: str, changed: dict[str, Any], finding: str | None) -> None:
    """An answer that differs, storage that is not hit, and a kill that reached nobody are named."""
    lines = [_line(each, **{**given, **(changed if each == run else {})}) for each, given in SGLANG_RUNS.items()]
    found = sglang_lane._findings(lines)
    assert len(found) == (finding is not None)
    assert not found or (found[0].startswith(run.partition(",")[0]) and finding in found[0])


def test_a_line_of_several_passes() -> None:
    """Counts are sums over the passes, seconds are medians, and each answer is compared with that of the engine."""
    passes = [
        Passed(
            served=(
                Served(tokens=(1,), num_cached_tokens=3, seconds=seconds),
                Served(tokens=(last,), num_cached_tokens=4, seconds=5 * seconds),
            ),
            hit_tokens=(1, 2, 4),
            cpu_seconds=seconds,
        )
        for last, seconds in ((2, 1.0), (9, 3.0))
    ]
    line = line_of("a run", passes, [(1,), (2,)], (10, 20), num_kills=2)
    assert (line.num_requests, line.num_equal, line.num_prompt_tokens, line.num_cached_tokens) == (4, 3, 60, 14)
    assert (line.hit_tokens, line.num_kills) == ((2, 4, 8), 2)
    assert (line.median_seconds, line.longest_seconds, line.cpu_seconds) == (4.0, 10.0, 2.0)


def test_the_blocks_on_disk_are_counted(tmp_path: Path) -> None:
    """What a store of files holds durably, as the engine that ended has left it."""
    with Rig(tmp_path, space=space_of("lane"), num_slots=10) as rig:
        rig.write(1, 2, 3)
    assert vllm_lane._num_blocks_on_disk(str(tmp_path)) == 3


def test_a_counter_of_a_page_of_metrics() -> None:
    """All its lines together; one that is not there is named, and taken for 0 by nobody."""
    page = 'vllm:a_total{engine="0"} 3.0\nvllm:a_total{engine="1"} 4.0\nvllm:ab_total 9.0\nvllm:c_total 0.0\n'
    assert (counter_of(page, "vllm:a_total"), counter_of(page, "vllm:c_total")) == (7, 0)
    with pytest.raises(LaunchError, match="has no vllm:b_total"):
        counter_of(page, "vllm:b_total")


def _http_pass(hits: int, answer: int = 0) -> Passed:
    served = tuple(Served(tokens=(number, answer), num_cached_tokens=0) for number in range(8))
    return Passed(served=served, hit_tokens=(0, hits, 0))


@pytest.mark.parametrize(
    ("passes", "case", "failed"),
    [
        ((_http_pass(0), _http_pass(1700), _http_pass(1700)), None, ""),
        ((_http_pass(0, 1), _http_pass(1700), _http_pass(1700)), "over HTTP, first pass", "8 answers differ"),
        ((_http_pass(0), _http_pass(100), _http_pass(1700)), "over HTTP, second pass", "only 100 tokens were hit"),
        ((_http_pass(0), _http_pass(1700), _http_pass(0)), "over HTTP, restarted", "only 0 tokens were hit"),
    ],
)
def test_what_is_asked_over_http(tmp_path: Path, passes: tuple[Passed, ...], case: str | None, failed: str) -> None:
    """Answers as those of vLLM alone, and hits in the second pass and behind a restart."""
    coming = iter(passes)

    class Alone(Told):
        def run(self, name: str, **plan: Any) -> StageResult:
            return StageResult(version="0", passes=(_http_pass(0),), up_seconds=1.0)

        def serve(self, name: str, num_passes: int, **plan: Any) -> list[Passed]:
            return [next(coming) for _ in range(num_passes)]

    found = {each.name: each.failed for each in http_cases(Alone(tmp_path, {}), "model") if each.failed}
    assert list(found) == ([case] if case else [])
    assert not case or found[case].startswith(failed)


class _Engine:
    """Answers every request in the next step."""

    def __init__(self) -> None:
        self.llm_engine = self
        self._names: list[str] = []

    def add_request(self, name: str, *_: Any, **__: Any) -> None:
        self._names.append(name)

    def step(self) -> list[Any]:
        names, self._names = self._names, []
        output = SimpleNamespace(token_ids=[1], logprobs=None)
        return [SimpleNamespace(request_id=n, outputs=[output], finished=True, num_cached_tokens=0) for n in names]


def test_ranks_are_killed_as_often_as_a_pass_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every fifth request of that pass, and in no other one."""
    for name, class_name in (("vllm", "SamplingParams"), ("vllm.lora.request", "LoRARequest")):
        module = ModuleType(name)
        vars(module)[class_name] = SimpleNamespace
        monkeypatch.setitem(sys.modules, name, module)
    killed, plan = [], StagePlan(model="", result="", passes=(), lengths=(4,) * 12)
    loop = VLLMLoop(_Engine(), plan, lambda: killed.append(loop._num_requests + 1))
    served = [loop.serve(pass_over(12, kill_every=each)) for each in (0, 5, 0)]
    assert killed == [17, 22] and [len(each) for each in served] == [12, 12, 12]


AMX = "MLA, by AMX where there is one"


class Told:
    """A lane that answers as it is told: by run, what is wrong with its passes."""

    def __init__(self, folder: Path, wrong: dict[str, Any]) -> None:
        self.folder, self._wrong = folder, wrong

    def run(self, name: str, **plan: Any) -> StageResult:
        passes = [self._pass(name, index, wanted, plan) for index, wanted in enumerate(plan["passes"])]
        return StageResult(version="0", passes=tuple(passes), up_seconds=1.0, **self._wrong.get(name, {}))

    def serve(self, name: str, num_passes: int, **plan: Any) -> list[Passed]:
        raise AssertionError("nothing is served over HTTP here")

    def _pass(self, name: str, index: int, wanted: Pass, plan: dict[str, Any]) -> Passed:
        """An answer follows from prompt, adapter and, where KV is wrong, from that."""
        is_ours, is_last = bool(plan.get("connector")), index == len(plan["passes"]) - 1
        lie = self._wrong.get(f"{name} {index}", {})
        noise = 1 if (plan.get("is_poisoned") and is_last and not self._wrong.get("blind")) or "answer" in lie else 0
        served = tuple(
            Served(
                tokens=(
                    0 if "alike" in lie else visit.prompt,
                    str(visit.adapter).count("2"),
                    noise,
                    visit.adapter is not None,
                ),
                num_cached_tokens=0,
                seconds=0.1,
                num_preemptions=int(wanted.num_concurrent > 1 and "preempted" not in self._wrong),
            )
            for visit in wanted.visits
            if not visit.abort_after_steps
        )
        cold = name == "cases" and index in {0, 2, 4, 5, 9}
        hits = lie.get("hits", 0 if cold or not is_ours else 1700)
        return Passed(served=served, hit_tokens=(0, hits, 0), cpu_seconds=1.0)


@pytest.mark.parametrize(
    ("wrong", "case", "failed"),
    [
        ({}, None, ""),
        ({"cases 2": {"hits": 32}}, "a salt", "32 tokens were hit that are others'"),
        ({"cases 5": {"hits": 64}}, "another adapter", "64 tokens were hit that are others'"),
        ({"cases 9": {"hits": 64}}, "after a reset", "64 tokens were hit that are others'"),
        ({"cases 1": {"hits": 0}}, "second pass", "only 0 tokens were hit"),
        ({"two ranks 1": {"answer": 1}}, "two ranks", "8 answers differ from those of vLLM alone"),
        ({"layer by layer 1": {"answer": 1}}, "layer by layer", "8 answers differ from those of vLLM alone"),
        ({"layer by layer 1": {"hits": 0}}, "layer by layer", "only 0 tokens were hit"),
        ({"preempted": False}, "preemption", "nobody was preempted"),
        ({"MLA alone": {"is_prefill_chunked": False}, "MLA": {"refused": "the model uses MLA"}}, None, ""),
        ({"MLA alone": {"is_prefill_chunked": False}}, "MLA", "it was not refused, with chunked prefill off: 16 of 16"),
        ({"MLA": {"refused": "the model uses MLA"}}, "MLA", "it was refused: the model uses MLA"),
        ({"MLA alone": {"is_prefill_chunked": False}, "MLA": {"refused": "no tier"}}, "MLA", "it was refused: no tier"),
        ({"MLA alone 0": {"alike": True}}, "MLA", "all prompts have the same answer: this shows nothing"),
        ({"MLA 1": {"answer": 1}}, "MLA", "8 answers differ from those of vLLM alone"),
        ({f"{AMX} 1": {"answer": 1}}, AMX, "8 answers differ from those of vLLM alone"),
        ({f"{AMX} 1": {"hits": 0}}, AMX, "only 0 tokens were hit"),
        ({"blind": True}, "bytes of the CPU tier turned over", "wrong KV gives the same answers"),
    ],
)
def test_a_case_that_does_not_hold_is_named(
    tmp_path: Path, wrong: dict[str, Any], case: str | None, failed: str
) -> None:
    """Others' hits, no hits, other answers, a comparison that sees no wrong KV, MLA that is served where vLLM's prefill
    cannot start behind it, or refused where it can, each fail their case alone."""
    pytest.importorskip("safetensors", reason="needs safetensors")
    found = {each.name: each.failed for each in run_cases(Told(tmp_path, wrong)) if each.failed}
    assert list(found) == ([case] if case else [])
    assert not case or found[case].startswith(failed)
