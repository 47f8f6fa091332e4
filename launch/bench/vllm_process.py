"""vLLM's manager in a process of its own: neither imports nor garbage of one of the two are the other's."""

from __future__ import annotations

import dataclasses
import gc
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.scale import FullCache
from fastdeploy_cache.launch.bench.serving import serve_workload
from fastdeploy_cache.launch.bench.steps import step_cost, vllm_step
from fastdeploy_cache.launch.bench.vllm_manager import Vllm, VllmServer, load_vllm, vllm_version
from fastdeploy_cache.launch.bench.workloads import Recipe, Scale

_ANSWER_SECONDS = 600.0
_END_SECONDS = 10.0


class VllmProcess:
    """Asks such a process for one measurement after the other."""

    def __init__(self, name: str, process: subprocess.Popen[str], errors: TextIO) -> None:
        self.name = name  # with its version
        self._process, self._errors = process, errors

    def serve(self, recipe: Recipe) -> dict[str, float]:
        """What `serve_workload` gives for a fresh manager."""
        return dict(self._ask(what="workload", recipe=dataclasses.asdict(recipe)))

    def serve_full(self, num_blocks: int, num_requests: int) -> float:
        """What `FullCache.serve` gives; the cache is filled first where the one before had another size."""
        return float(self._ask(what="full", num_blocks=num_blocks, num_requests=num_requests))

    def step(self, block_size: int, num_steps: int) -> float:
        """What `step_cost` gives."""
        return float(self._ask(what="step", block_size=block_size, num_steps=num_steps))

    def _ask(self, **question: Any) -> Any:
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None and answers is not None
        try:
            to.write(json.dumps(question) + "\n")
            to.flush()
        except OSError as error:
            raise self._failure(str(error)) from error
        ready, _, _ = select.select([answers], [], [], _ANSWER_SECONDS)
        line = answers.readline() if ready else ""
        if not line:
            raise self._failure("it has ended" if ready else f"no answer within {_ANSWER_SECONDS:.0f} s")
        return json.loads(line)

    def _failure(self, reason: str) -> LaunchError:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines() or [reason]
        return LaunchError(
            f"{self.name} could not be driven: {lines[-1]}; give the folder of version 0.32, or leave --peer out"
        )


@contextmanager
def vllm_process(folder: Path) -> Iterator[VllmProcess]:
    """A new process; `folder` holds the package. It ends on leaving.

    Raises:
        LaunchError: there is no such package.
    """
    name = f"vLLM {vllm_version(folder)}"
    command = [sys.executable, "-P", "-m", "fastdeploy_cache.launch.bench.vllm_process", str(folder)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield VllmProcess(name, process, errors)
        finally:
            process.kill()  # it holds nothing that has to be put away
            process.communicate(timeout=_END_SECONDS)


def _answer(vllm: Vllm, questions: Iterable[str], to: TextIO) -> None:
    full: tuple[int, FullCache] | None = None
    gc.collect()
    gc.freeze()  # as engines do when they have started
    for line in questions:
        asked = json.loads(line)
        answer: object
        if asked["what"] == "workload":
            workload = Recipe(**asked["recipe"]).make()
            num_blocks = workload.pool_tokens // workload.block_size
            server = VllmServer(vllm, workload.block_size, num_blocks, workload.num_in_flight)
            answer = serve_workload(server, workload)
        elif asked["what"] == "step":
            answer = step_cost(vllm_step(vllm, asked["block_size"]), asked["num_steps"])
        else:
            num_blocks = asked["num_blocks"]
            if full is None or full[0] != num_blocks:
                server = VllmServer(vllm, Scale.block_size, num_blocks, Scale.num_in_flight)
                full = num_blocks, FullCache(num_blocks, server)
            answer = full[1].serve(asked["num_requests"])
        to.write(json.dumps(answer) + "\n")
        to.flush()


if __name__ == "__main__":
    _answer(load_vllm(Path(sys.argv[1])), sys.stdin, sys.stdout)
