"""`python -m fastdeploy_cache.launch` is the command `fastdeploy-cache`."""

from __future__ import annotations

from fastdeploy_cache.launch.cli import main

if __name__ == "__main__":
    main()
