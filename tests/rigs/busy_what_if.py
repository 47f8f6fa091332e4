"""The what-if process, at work on its first record for ever. It tells its parent by SIGUSR1 that it has begun."""

from __future__ import annotations

import os
import signal

from fastdeploy_cache.what_if.__main__ import main
from fastdeploy_cache.what_if.estimator import Estimator
from fastdeploy_cache.what_if.records import Reference


def work(_: Estimator, reference: Reference) -> None:
    del reference
    os.kill(os.getppid(), signal.SIGUSR1)
    while True:
        pass


if __name__ == "__main__":
    Estimator.feed = work  # type: ignore[method-assign]
    raise SystemExit(main())
