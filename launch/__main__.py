"""The command `fastdeploy-cache`, and `python -m fastdeploy_cache.launch`, which is the same."""

from __future__ import annotations

import sys

from fastdeploy_cache.launch import interrupts


def main() -> None:
    """Entry point. What it runs takes most of a second to load: Ctrl-C in that second is one line, too."""
    interrupts.interrupt_once()
    try:
        from fastdeploy_cache.launch.cli import main as run

        run()
    except KeyboardInterrupt:
        print("fastdeploy-cache: interrupted", file=sys.stderr)
        raise SystemExit(interrupts.STATUS) from None


if __name__ == "__main__":
    main()
