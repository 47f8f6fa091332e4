"""The begin of every process of a rank, before it has imported what is large."""

from __future__ import annotations

import importlib
import logging
import sys

from fastdeploy_cache.ipc.shortage import EXIT_SHORT, is_shortage, limit_of

logger = logging.getLogger(__name__)


def begin(worker: str) -> int:
    """Run `main` of the module `worker`; returns the exit status, which tells a want of descriptors, threads or memory.

    The imports alone open hundreds of files. The engine tries again after one of those, and counts no death.
    """
    try:
        status: int = importlib.import_module(worker).main()
    except Exception as error:
        if not is_shortage(error):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())  # in one line, for which `supervisor` looks
        logger.error("event=cannot_start rank=%s reason=%s; %s", sys.argv[2], reason, limit_of(error))
        return EXIT_SHORT
    return status
