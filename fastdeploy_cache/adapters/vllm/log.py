"""Our log in vLLM's: vLLM sets up its own logger only, and what others log below a warning is lost."""

from __future__ import annotations

import logging


def show_log(ours: str = "fastdeploy_cache", theirs: str = "vllm") -> None:
    """Where nobody has set up our logger, let it write where and from the level on that theirs does. Safe to repeat."""
    logger, example = logging.getLogger(ours), logging.getLogger(theirs)
    if logger.hasHandlers() or not example.handlers:
        return
    for handler in example.handlers:
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(example.level)
