"""What to do after the demo: commands that work where it was run."""

from __future__ import annotations

import os
from pathlib import Path

_LAUNCH = Path(__file__).resolve().parents[1]


def next_steps(launch: Path = _LAUNCH) -> str:
    """The text. `launch` is the folder of our programs: that of a checkout has scripts, and pages beside it."""
    if (launch / "start.sh").is_file():
        root = os.path.relpath(launch.parent)
        steps = {
            f"{root}/launch/start.sh": "a server with OpenAI's API at 127.0.0.1:8000",
            f"{root}/launch/engines.sh vllm": "a real vLLM with the cache, and without it",
            f"less {root}/docs/engine.md": "the cache in an engine of your own",
        }
    else:
        steps = {
            "fastdeploy-cache start": "a server with OpenAI's API at 127.0.0.1:8000",
            "fastdeploy-cache engines vllm": "an installed vLLM with the cache, and without it",
            "python -m pydoc fastdeploy_cache.PrefixCacheManager": "the cache in an engine of your own",
        }
    width = max(map(len, steps))
    return "\n".join(["", "What next?", *(f"  {step:{width}}   {meaning}" for step, meaning in steps.items())])
