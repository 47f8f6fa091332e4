"""vLLM's manager beside ours: it serves the same, its package needs no library, and what is no such package is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.control_command import bench_control
from fastdeploy_cache.launch.bench.options import ControlOptions
from fastdeploy_cache.launch.bench.serving import new_server, serve_workload
from fastdeploy_cache.launch.bench.vllm_manager import vllm_version
from fastdeploy_cache.launch.bench.vllm_process import vllm_process
from fastdeploy_cache.launch.bench.workloads import Recipe
from tests.rigs.stand_in_vllm import VERSION, write_stand_in


@pytest.mark.processes
def test_it_serves_the_same_requests(tmp_path: Path) -> None:
    """Hits are those of our manager, every phase that it has takes time; full pools and steps are measured, too."""
    recipe = Recipe("chat", 64, 60)
    workload = recipe.make()
    ours = serve_workload(new_server(workload), workload)
    with vllm_process(write_stand_in(tmp_path)) as vllm:
        assert vllm.name == f"vLLM {VERSION}"
        theirs = vllm.serve(recipe)
        assert theirs["hit"] == ours["hit"] > 0.3
        assert all(theirs[phase] > 0 for phase in ("request", "match", "allocate", "decode", "release"))
        assert vllm.serve_full(640, 4) > 0
        assert vllm.step(16, 2) > 0


@pytest.mark.processes
def test_a_version_that_is_too_different_is_told(tmp_path: Path) -> None:
    """The error has the version, what failed there, and what to do."""
    folder = write_stand_in(tmp_path, kv_cache_manager="class AnotherManager:\n    pass\n")
    with vllm_process(folder) as vllm, pytest.raises(LaunchError) as caught:
        vllm.serve(Recipe("chat", 64, 4))
    assert VERSION in str(caught.value) and "KVCacheManager" in str(caught.value) and "--peer" in str(caught.value)


@pytest.mark.processes
def test_a_pool_that_is_too_small_is_told(tmp_path: Path) -> None:
    """A manager that gives no blocks ends the measurement, not the wait for it."""
    refusing = "class KVCacheManager:\n    def __init__(self, *_, **__): pass\n"
    refusing += "    def get_computed_blocks(self, _): return [], 0\n    def allocate_slots(self, *_): return None\n"
    with vllm_process(write_stand_in(tmp_path, kv_cache_manager=refusing)) as vllm:
        with pytest.raises(LaunchError, match="pool is too small"):
            vllm.step(16, 1)
        with pytest.raises(LaunchError, match="could not be driven"):
            vllm.step(16, 1)


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    """Before anything is measured: a folder without vLLM, another peer, no folder."""
    with pytest.raises(LaunchError, match="holds no vllm/v1/core"):
        vllm_version(tmp_path)
    for peer in ("sglang=there", "vllm", "vllm="):
        with pytest.raises(LaunchError, match="give vllm=FOLDER"):
            bench_control(ControlOptions(peer=peer), None)


@pytest.mark.processes
def test_what_is_left_out_of_a_package_is_hollow(tmp_path: Path) -> None:
    """Stand-ins allow what modules do while they load: derive, decorate, subscript, join, call; and no more."""
    package = tmp_path / "theirs"
    (package / "part").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError\n")
    (package / "part" / "real.py").write_text("""
import json
import absent_library.inner as inner
from theirs.other import Base, decorate, factory, Generic

class Mine(Base):
    @decorate
    def one(self): return 1
    @decorate.with_options(2)
    def two(self, x: Generic[int] | None): return 2

made = factory(3)
assert not made and list(made.items()) == [] and not hasattr(made, "__len__")
print(json.dumps([Mine().one(), Mine().two(None), inner.thing.__name__]))
""")
    program = (
        "import sys, pathlib\n"
        "from fastdeploy_cache.launch.bench.hollow_modules import import_from_now_on\n"
        "import_from_now_on(pathlib.Path(sys.argv[1]), 'theirs', ('part.',))\n"
        "import theirs.part.real\n"
        "try: import json.absent\n"
        "except ImportError: print('absent')\n"
    )
    command = [sys.executable, "-P", "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == '[1, 2, "thing"]\nabsent\n', done.stderr
