"""The command `fastdeploy-cache`, and `python -m fastdeploy_cache.launch`, which is the same."""

from __future__ import annotations

import sys

from fastdeploy_cache.launch import interrupts


def main() -> None:
    """Entry point: Ctrl-C is one line on standard error and status 130, also while the rest is being loaded, which
    takes most of a second."""
    interrupts.interrupt_once()
    try:
        from fastdeploy_cache.launch.cli import main as run

        run()
        return
    except KeyboardInterrupt:
        pass
    except SystemExit as end:
        if end.code != interrupts.STATUS:
            raise
    print("fastdeploy-cache: interrupted", file=sys.stderr)
    raise SystemExit(interrupts.STATUS)


if __name__ == "__main__":
    main()
