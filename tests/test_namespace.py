"""Installed, everything is `fastdeploy_cache.*`: no name of ours meets one of somebody else's."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
BESIDE = ("ipc", "launch", "metrics", "transfer_manager")
IMPORT_ALL = """
import importlib, pkgutil, sys
import fastdeploy_cache
vllm, sglang = "fastdeploy_cache.adapters.vllm.", "fastdeploy_cache.adapters.sglang."
linker = "fastdeploy_cache.adapters.sglang_linker."
NEEDS_OTHERS = (
    *(vllm + "connector", vllm + "connector_metrics", vllm + "settings"),
    *(sglang + "hicache_config", sglang + "hicache_storage", linker + "linker", linker + "settings"),
)
for found in pkgutil.walk_packages(fastdeploy_cache.__path__, "fastdeploy_cache."):
    if found.name not in NEEDS_OTHERS and not found.name.endswith("__main__"):
        importlib.import_module(found.name)
print(*sys.modules)
"""


def run_python(code: str, *, cwd: Path | None = None, path: Path | None = None) -> list[str]:
    """The words that a fresh interpreter prints."""
    env = {**os.environ, "PYTHONPATH": str(path)} if path is not None else None
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_nothing_is_ever_loaded_under_a_name_that_is_not_ours(tmp_path: Path) -> None:
    """With every module of the project loaded, none is called `ipc`, `launch`, `metrics` or `transfer_manager`."""
    loaded = run_python(IMPORT_ALL, cwd=tmp_path)
    assert not {name for name in loaded if name.partition(".")[0] in BESIDE}
    assert "fastdeploy_cache.manager" in loaded
    for package in BESIDE:
        assert any(name.startswith(f"fastdeploy_cache.{package}.") for name in loaded)


NOT_FOR_A_START = {
    *("aiohttp", "asyncio", "concurrent.futures", "difflib", "email", "http.server", "ipaddress", "multiprocessing"),
    *("paddle", "pathlib", "prometheus_client", "rich", "shutil", "socket", "ssl", "subprocess", "tempfile", "tomllib"),
    *("torch", "typer", "urllib.request", "xxhash", "zmq.asyncio", "zmq.auth"),
}


def test_importing_the_manager_loads_only_what_every_engine_needs(tmp_path: Path) -> None:
    """No web server, exporter, event loop, store, link, rank or program is loaded before it is used."""
    base = set(run_python("import sys, numpy, zmq, msgspec; print(*sys.modules)", cwd=tmp_path))
    code = "import sys; from fastdeploy_cache import PrefixCacheManager; print(*sys.modules)"
    loaded = set(run_python(code, cwd=tmp_path)) - base
    assert not loaded & NOT_FOR_A_START
    lazy = ("launch", "adapters", "peers.link_road", "storage.tier", "metrics.exporter", "transfer_manager.process")
    lazy += ("transfer_manager.peer.client", "transfer_manager.storage.client", "transfer_manager.rank")
    assert not [name for name in loaded if name.startswith(tuple(f"fastdeploy_cache.{each}" for each in lazy))]
    assert "fastdeploy_cache.manager" in loaded


@pytest.mark.parametrize("program", ["rank", "storage", "peer"])
def test_a_child_process_loads_no_engine_side(program: str, tmp_path: Path) -> None:
    """What a rank's process imports has no manager, no metrics, none of the programs and no half of a parent in it."""
    code = f"import sys, fastdeploy_cache.transfer_manager.{program}.worker; print(*sys.modules)"
    loaded = run_python(code, cwd=tmp_path)
    engine_side = (
        "fastdeploy_cache.metrics",
        "fastdeploy_cache.launch",
        "fastdeploy_cache.manager",
        "prometheus_client",
    )
    assert not [name for name in loaded if name.startswith(engine_side)]
    manager, halves = "fastdeploy_cache.transfer_manager", ("callbacks", "child", "client", "flights", "io_thread")
    parents = {f"{manager}.process.{half}" for half in (*halves, "owner", "supervisor", "task_flow")}
    parents |= {f"{manager}.{room}.{half}" for room in ("rank", "storage", "peer") for half in ("client", "owner")}
    parents |= {f"{manager}.client", f"{manager}.kv.rank_kv"}
    assert not parents & set(loaded)
    assert f"{manager}.process.main" in loaded
    assert "fastdeploy_cache.transfer_manager.kv.layout" in loaded


def test_modules_of_an_app_with_such_names_hurt_nothing(tmp_path: Path) -> None:
    """An app has its own `metrics.py`, `ipc.py`, `launch/cli.py` and `transfer_manager.py` first on the path: all of
    ours is imported, and the command runs."""
    for name in ("ipc", "metrics", "transfer_manager"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the module of the app was imported')")
    (tmp_path / "launch").mkdir()
    for name in ("__init__", "cli"):
        (tmp_path / "launch" / f"{name}.py").write_text("raise SystemExit('the module of the app was imported')")
    assert "fastdeploy_cache.launch.cli" in run_python(IMPORT_ALL, cwd=tmp_path, path=tmp_path)
    code = "from fastdeploy_cache.launch.__main__ import main; import sys; sys.argv[1:] = ['--help']; main()"
    assert "demo" in run_python(code, cwd=tmp_path, path=tmp_path)


def test_each_public_name_has_its_home() -> None:
    """Every name in `__all__` is there, `dir` lists these and no others, and an unknown one is refused."""
    import fastdeploy_cache

    assert dir(fastdeploy_cache) == sorted([*fastdeploy_cache.__all__, "__version__"])
    for name in fastdeploy_cache.__all__:
        assert getattr(fastdeploy_cache, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Manager'"):
        _ = fastdeploy_cache.Manager


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools is not installed")
def test_an_archive_without_links_installs_every_package(tmp_path: Path) -> None:
    """An archive that has lost its symbolic links builds each module of the checkout, under one name."""
    archive, built = tmp_path / "archive", tmp_path / "built"
    archive.mkdir()
    for package in ("fastdeploy_cache", *BESIDE):
        links = shutil.ignore_patterns("__pycache__", *(BESIDE if package == "fastdeploy_cache" else ()))
        shutil.copytree(ROOT / package, archive / package, ignore=links)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, archive)
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    done = subprocess.run(build, cwd=archive, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    inside = {str(path.relative_to(built)) for path in built.rglob("*") if path.is_file()}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "fastdeploy_cache").rglob("*.py")}
    expected |= {
        f"fastdeploy_cache/{path.relative_to(ROOT)}" for name in BESIDE for path in (ROOT / name).rglob("*.py")
    }
    assert {name for name in inside if name.endswith(".py")} == expected
    assert {"fastdeploy_cache/py.typed", "fastdeploy_cache/launch/serve.toml"} <= inside
