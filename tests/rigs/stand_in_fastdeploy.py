"""A package with the name and the shape of FastDeploy's, as far as the door looks at it: paths, names and parameters.

Nothing in it is FastDeploy's own. `write` puts it into a folder; what its entry points print is what the tests read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# The parameters of each call, as the newest known version has them.
CALLS: Mapping[str, str] = {
    "__init__": 'config, tensor_parallel_size, splitwise_role="mixed", local_data_parallel_id=0',
    "launch_cache_manager": "cache_config, tensor_parallel_size, device_ids, pod_ip, engine_worker_queue_port, "
    "ipc_suffix, create_cache_tensor",
    "update_cache_config": "cache_config",
    "can_allocate_gpu_blocks": "num_blocks, try_free_gpu_blocks=True",
    "allocate_gpu_blocks": "num_blocks, req_id=None",
    "recycle_gpu_blocks": "gpu_block_ids, req_id=None",
    "request_match_blocks": "task, block_size, *args",
    "request_block_ids": "task, block_size, dec_token_num, *args",
    "update_cache_blocks": "task, block_size, num_computed_tokens",
    "release_block_ids": "task",
    "wait_prefetch_storage_task": "req_id",
    "get_block_hash_extra_keys": "request, start_idx, end_idx, mm_idx",
    "reset": "wait_for_tasks_done=False",
    "match_block": "req_id, input_ids, block_size",
    "_prepare_cache": "anything",
}
# What three of them write, which their callers read.
BODIES: Mapping[str, str] = {
    "request_match_blocks": "task.num_cached_blocks = 0; return [], 0, {'gpu_match_token_num': 0, "
    "'storage_match_token_num': 0, 'gpu_recv_block_ids': []}",
    "update_cache_blocks": "task.num_cached_blocks = num_computed_tokens // block_size",
    "request_block_ids": "return [], [], {'gpu_cache_blocks': 0, 'cpu_cache_blocks': 0}",
}
_RESOURCES = """
from fastdeploy.cache_manager.prefix_cache_manager import PrefixCacheManager

class ResourceManager:
    def __init__(self, config):
        self.cache_manager = PrefixCacheManager(config, 1, "mixed", 0)
"""
_SERVICE = """
import sys

def tell(where):
    from fastdeploy.engine.resource_manager import PrefixCacheManager
    print(where, PrefixCacheManager.__module__, flush=True)
"""
_API_SERVER = """
import multiprocessing, sys
from fastdeploy.engine.service import tell

def of_main(where):
    tell(where)
    if where == "spawn":  # and its own child
        child = multiprocessing.get_context("spawn").Process(target=tell, args=("spawned twice",))
        child.start()
        child.join(60)

if __name__ == "__main__":
    if sys.argv[1:] == ["nothing"]:
        print("nothing", "fastdeploy.cache_manager.prefix_cache_manager" in sys.modules)
    else:
        tell("here")
        print("argv", *sys.argv[1:], flush=True)
        print("file", sys.argv[0] == __file__, flush=True)
        for method in sys.argv[1:]:
            child = multiprocessing.get_context(method).Process(target=of_main, args=(method,))
            child.start()
            child.join(60)
            print("exit", child.exitcode, flush=True)
"""
_STARTER = """
import subprocess, sys

if __name__ == "__main__":
    command = [sys.executable, "-m", "fastdeploy.entrypoints.openai.api_server", *sys.argv[1:]]
    subprocess.Popen(command).wait(60)
    other = "from fastdeploy.engine.service import tell; tell('other')"
    subprocess.Popen([sys.executable, "-c", other]).wait(60)
"""


def write(folder: Path, calls: Mapping[str, str] = CALLS, bodies: Mapping[str, str] = BODIES) -> Path:
    """Write the package, whose cache manager has these calls, into a folder; returns the folder, for `sys.path`."""
    methods = "".join(
        f"    def {name}(self, {given}): {bodies.get(name, 'raise NotImplementedError')}\n"
        for name, given in calls.items()
    )
    files = {
        "cache_manager/prefix_cache_manager.py": f"class PrefixCacheManager:\n{methods}",
        "engine/resource_manager.py": _RESOURCES,
        "engine/service.py": _SERVICE,
        "entrypoints/openai/api_server.py": _API_SERVER,
        "entrypoints/openai/multi_api_server.py": _STARTER,
        "entrypoints/cli/main.py": _STARTER,
    }
    for name, text in files.items():
        path = folder / "fastdeploy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in [folder / "fastdeploy", *(folder / "fastdeploy").rglob("*")]:
        if path.is_dir():
            (path / "__init__.py").touch()
    return folder
