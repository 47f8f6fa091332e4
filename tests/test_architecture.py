"""The shape of the code: who may import whom, where heavy libraries live, how long things are."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.rooms import OWN_PROCESSES, PARENT_SIDE, ROOMS

ROOT = Path(__file__).parent.parent
LINKED = ("ipc", "metrics", "transfer_manager", "launch")  # subpackages of fastdeploy_cache that lie beside it
PACKAGES = (*LINKED, "fastdeploy_cache")
LEAF = "fastdeploy_cache.errors"  # what every package may import
ALLOWED = {
    "ipc": set(),
    "metrics": {"ipc"},
    "transfer_manager": {"ipc"},
    "fastdeploy_cache": {"transfer_manager", "ipc", "metrics"},
    "launch": {"fastdeploy_cache", "transfer_manager", "metrics", "ipc"},
}
# The first two run in the model's worker, which makes KV arrays; the last gives slots as tensors.
WITH_TENSORS = {
    "fastdeploy_cache/adapters/fastdeploy/worker.py": {"kv.tensors", "device", "device.cuda"},
    "fastdeploy_cache/adapters/vllm/worker.py": {"kv.tensors", "device", "device.cuda", "device.cuda_driver"},
    "fastdeploy_cache/adapters/sglang_linker/page_cache.py": {"kv.tensors", "device", "device.cuda"},
    "fastdeploy_cache/adapters/sglang_linker/device_pools.py": {"kv.tensors"},
    "fastdeploy_cache/adapters/slots/pages.py": {"kv.tensors"},
}
HOMES = {
    "cryptography": {"transfer_manager/storage/encrypted.py", "transfer_manager/storage/tenant_keys.py"},
    "zmq": {
        "ipc/event_stream.py",
        "ipc/peer_channel.py",
        "ipc/poller.py",
        "launch/bench/ping_pong.py",
        "launch/faults/peer_calls.py",
    },
    "msgspec": {
        "transfer_manager/storage/encrypted.py",
        "transfer_manager/storage/file_space.py",
        "transfer_manager/storage/mooncake_admin.py",
        "transfer_manager/storage/valkey.py",
        "fastdeploy_cache/adapters/fastdeploy/config.py",
        "fastdeploy_cache/adapters/vllm/kv_hints.py",
        "fastdeploy_cache/policies/session_pauses.py",
        "fastdeploy_cache/books/block_keys.py",
        "fastdeploy_cache/books/block_sample.py",
        "fastdeploy_cache/books/checkpoint.py",
        "fastdeploy_cache/books/run.py",
        "fastdeploy_cache/books/run_notes.py",
        "fastdeploy_cache/policies/reuse_history.py",
        "fastdeploy_cache/requests/accounts.py",
        "fastdeploy_cache/requests/active_request.py",
        "fastdeploy_cache/requests/tables.py",
        "fastdeploy_cache/requests/trail.py",
        "fastdeploy_cache/events/journal.py",
        "fastdeploy_cache/events/names.py",
        "fastdeploy_cache/events/questions.py",
        "fastdeploy_cache/events/wire.py",
        "fastdeploy_cache/insight/what_if/setup.py",
        "fastdeploy_cache/requests/match.py",
        "fastdeploy_cache/books/tokens.py",
        "ipc/codec.py",
        "transfer_manager/kv/memory.py",
        "transfer_manager/storage/keys.py",
        "transfer_manager/device/base.py",
        "transfer_manager/process/setup.py",
        "transfer_manager/process/wire.py",
        "transfer_manager/storage/setup.py",
        "transfer_manager/peer/link.py",
        "transfer_manager/peer/messages.py",
        "transfer_manager/peer/offer.py",
        "fastdeploy_cache/config/cache.py",
        "launch/engines/results.py",
        "launch/engines/vllm_plan.py",
        "launch/faults/command.py",
        "launch/faults/soak_lines.py",
        "launch/faults/search.py",
        "launch/faults/drawing.py",
        "launch/faults/story.py",
        "launch/server/api_requests.py",
        "fastdeploy_cache/insight/control/messages.py",
        "fastdeploy_cache/insight/control/server.py",
        "launch/server/instance_app.py",
        "launch/simulator/trace.py",
    },
    "aiohttp": {
        f"launch/server/{module}.py"
        for module in (
            *("answers", "forwarding", "http_server", "instance_app", "limits"),
            *("request_log", "router", "router_pages", "streams", "upstream"),
        )
    },
    "prometheus_client": {
        "launch/server/router_pages.py",
        "fastdeploy_cache/adapters/vllm/connector_metrics.py",
        *(
            f"metrics/{module}.py"
            for module in (
                *(
                    "cache_metrics",
                    "event_metrics",
                    "exporter",
                    "families",
                    "fastdeploy_names",
                    "peer_counts",
                    "picture",
                    "remote",
                ),
                *("page_samples", "request_counts", "task_counts", "what_if_metrics"),
            )
        ),
    },
    "paddle": {"launch/reference_engine/paddle_runtime.py", "transfer_manager/kv/tensors.py"},
    "xxhash": {"transfer_manager/storage/base.py"},
    "torch": {"launch/gpu/torch_arrays.py", "transfer_manager/kv/tensors.py"},
    "vllm": {
        "fastdeploy_cache/adapters/vllm/connector.py",
        "fastdeploy_cache/adapters/vllm/connector_metrics.py",
        "fastdeploy_cache/adapters/vllm/settings.py",
        "launch/engines/vllm_loop.py",
        "launch/engines/vllm_stage.py",
    },
    "sglang": {
        "fastdeploy_cache/adapters/sglang/hicache_config.py",
        "fastdeploy_cache/adapters/sglang/hicache_storage.py",
        "fastdeploy_cache/adapters/sglang_linker/linker.py",
        "fastdeploy_cache/adapters/sglang_linker/settings.py",
        "launch/engines/sglang_stage.py",
    },
    "cuda": {"transfer_manager/device/cuda_driver.py"},
    "gguf": {"launch/reference_engine/gguf_file.py"},
    "tokenizers": {"launch/reference_engine/tokenizer.py"},
    "typer": {
        "launch/background/cli.py",
        "launch/background/group_plan.py",
        "launch/bench/options.py",
        "launch/cli.py",
        "launch/config_cli.py",
        "launch/faults/command.py",
        "launch/faults/options.py",
        "launch/operating/asking.py",
        "launch/operating/cli.py",
        "launch/options.py",
        "launch/server/options.py",
        "launch/simulator/options.py",
        "launch/storage/cli.py",
        "launch/storage/place.py",
    },
    "rich": {
        "launch/demo/command.py",
        "launch/demo/report.py",
        "launch/demo/routed.py",
        "launch/engines/report.py",
        "launch/faults/command.py",
        "launch/faults/soak_command.py",
        "launch/findings.py",
        "launch/operating/text.py",
        "launch/operating/watch.py",
        "launch/simulator/command.py",
        "launch/simulator/report.py",
        "launch/storage/report.py",
        "launch/storage/command.py",
    },
    "matplotlib": {"launch/simulator/plot.py"},
    "opentelemetry": {"fastdeploy_cache/insight/flight/traces.py"},
}
# A benchmark's baseline; and who tells the children of another engine what their main module is.
MULTIPROCESSING = {"launch/bench/ping_pong.py", "fastdeploy_cache/adapters/fastdeploy/run.py"}
# What adapters are called, since those who know the other project look for these names.
NAMES_OF_OTHERS = {"BlockPool", "MatchResult", "Node", "PrefixCacheManager", "Req"}
NAMES_OF_TWO = {"Instances", "Offer", "Place", "Row"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 50
BANNED_NAMES = {"utils", "common", "helpers", "util", "helper"}


def files(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All of the kinds that are looked at here: one walk for all tests."""
    kinds = ast.stmt, ast.ExceptHandler, ast.keyword
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, kinds)]


@pytest.fixture(scope="module", autouse=True)
def trees_go() -> Iterator[None]:
    """They are a million objects, and every look for garbage in a later test would go over them."""
    yield
    nodes_of.cache_clear()
    tree_of.cache_clear()


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """What a file imports. Modules of ours are named by where they lie: `fastdeploy_cache.ipc.codec` is `ipc.codec`."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (by_place(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from {by_place(f"{node.module}.{alias.name}", str(node.module)) for alias in node.names}


@functools.cache
def by_place(module: str, otherwise: str = "") -> str:
    """The name by the folder that a module lies in. `from package import name` may name a module, or what is in one."""
    for name in (module, otherwise or module):
        below = name.removeprefix("fastdeploy_cache.")
        place = below if below.partition(".")[0] in LINKED else name
        path = ROOT / place.replace(".", "/")
        if path.is_dir() or path.with_suffix(".py").is_file():
            return place
    return otherwise or module


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_downwards(package: str) -> None:
    """A package imports only packages of lower layers."""
    for path in files(package):
        for module in imports(path):
            top = module.partition(".")[0]
            if top in PACKAGES and top != package and module != LEAF:
                assert top in ALLOWED[package], f"{name(path)} imports {module}"


def test_the_engine_side_uses_only_the_parent_side_of_the_ranks() -> None:
    """Nothing in fastdeploy_cache reaches a worker, a device or a storage."""
    for path in files("fastdeploy_cache"):
        for module in imports(path):
            if module.startswith("transfer_manager."):
                below = module.partition(".")[2]
                room = path.relative_to(ROOT).parts[1]
                allowed = below in PARENT_SIDE | WITH_TENSORS.get(name(path), set()) | OWN_PROCESSES.get(room, set())
                assert allowed, f"{name(path)} imports {module}"


@pytest.mark.parametrize("package", sorted(ROOMS))
def test_rooms_of_a_package_import_only_what_they_may(package: str) -> None:
    """Each import from one room into another is in the table, and so is each room."""
    for path in files(package):
        room = path.relative_to(ROOT / package).with_suffix("").parts[0]
        if room == "__init__":
            continue
        for module in imports(path):
            top, _, below = module.partition(".")
            other = below.partition(".")[0]
            if top == package and other != room:
                assert other in ROOMS[package][room], f"{name(path)} imports {module}"


def test_modules_of_a_package_do_not_import_each_other_in_a_circle() -> None:
    """Within a package, too, there is an order to read it in."""
    graph = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): set(imports(path))
        for path in files(*PACKAGES)
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"circle: {' -> '.join((*trail, module))}"
        if module not in done:
            for other in graph[module] & graph.keys():
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("library", sorted(HOMES))
def test_each_heavy_library_has_one_home(library: str) -> None:
    """A change of library touches the files that are listed, no others."""
    users = {name(p) for p in files(*PACKAGES) if any(m.partition(".")[0] == library for m in imports(p))}
    assert users == HOMES[library]


def test_the_core_imports_no_framework_by_itself() -> None:
    """Paddle, PyTorch and NVIDIA's bindings are imported nowhere when a module is, only inside the functions that need
    them."""
    for path in files(*PACKAGES):
        tree = tree_of(path)
        at_import = {
            alias.name if isinstance(node, ast.Import) else str(node.module)
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not {module.partition(".")[0] for module in at_import} & {"paddle", "torch", "cuda"}, name(path)


def test_files_and_functions_stay_short() -> None:
    """No file over 400 lines, no function over 50."""
    for path in files(*PACKAGES, "tests"):
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_FILE_LINES, name(path)
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or 0) - node.lineno + 1
                assert num_lines <= MAX_FUNCTION_LINES, f"{name(path)}: {node.name} has {num_lines} lines"


def test_no_module_is_a_drawer() -> None:
    """No utils, common or helpers; nothing named like a standard module."""
    for path in files(*PACKAGES):
        assert path.stem not in BANNED_NAMES | {"queue", "signal", "select", "types"}, name(path)


def test_forbidden_ways() -> None:
    """No pickle, no shell=True, no bare except anywhere in the product."""
    for path in files(*PACKAGES):
        used = {module.partition(".")[0] for module in imports(path)}
        allowed = {"multiprocessing"} if name(path) in MULTIPROCESSING else set()
        assert not ({"pickle", "marshal", "shelve", "multiprocessing"} & used) - allowed, name(path)
        for node in nodes_of(path):
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{name(path)}: bare except"
            assert not (isinstance(node, ast.keyword) and node.arg == "shell"), f"{name(path)}: shell="


def test_a_class_has_its_name_alone() -> None:
    """No two public classes of the product have one name, but for those that bear another project's names, and those
    that are known: each name stands for one thing."""
    homes: dict[str, list[str]] = {}
    for path in files(*PACKAGES):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name(path))
    assert {known for known, found in homes.items() if len(found) > 1} == NAMES_OF_OTHERS | NAMES_OF_TWO


def test_broad_except_only_at_the_boundaries() -> None:
    """`except Exception` stands where a task's, or a control request's, failure becomes its answer, around a process
    that begins, around callers' callbacks, where another engine's pool is asked, in the two places that contain what a
    verb must not fail by, and where the simulation stands for an interpreter, a pool of threads or an engine."""
    found = {
        name(path)
        for path in files(*PACKAGES)
        for node in nodes_of(path)
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id == "Exception"
    }
    assert found == {
        "transfer_manager/process/lane_task.py",
        "transfer_manager/process/begin.py",
        "transfer_manager/process/callbacks.py",
        "fastdeploy_cache/books/books.py",
        "fastdeploy_cache/books/mishaps.py",
        "fastdeploy_cache/books/leaves/guarded.py",
        "fastdeploy_cache/adapters/sglang/hicache_storage.py",
        "fastdeploy_cache/adapters/fastdeploy/kv_arrivals.py",
        "fastdeploy_cache/insight/control/server.py",
        "launch/faults/process_calls.py",
        "launch/faults/threads.py",
        "launch/faults/user.py",
    }


def test_every_test_says_what_it_shows() -> None:
    """Each test function has a docstring of one line or more."""
    for path in files("tests"):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert ast.get_docstring(node), f"{name(path)}: {node.name} has no docstring"


def test_what_tests_share_lies_in_rigs() -> None:
    """No test module and no conftest is imported by anything, and no rig is a test."""
    for path in files("tests"):
        for module in imports(path):
            names = module.split(".")
            assert not [each for each in names if each == "conftest" or each.startswith("test_")], (
                f"{name(path)} imports {module}: move what they share to tests/rigs"
            )
    for path in files("tests/rigs"):
        tests = [n.name for n in nodes_of(path) if isinstance(n, ast.FunctionDef) and n.name[:5] == "test_"]
        assert not tests and not path.stem.startswith("test_"), f"{name(path)} has tests"
