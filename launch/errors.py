"""Which errors a program reports in one line, without a traceback."""

from __future__ import annotations

from fastdeploy_cache.errors import CacheError
from ipc.errors import IPCError
from launch.reference_engine.errors import ModelLoadError
from launch.reference_engine.generation import GenerationError
from metrics.errors import MetricsError
from transfer_manager.errors import TransferError


class LaunchError(Exception):
    """A program cannot do what it was asked to; the message says what to do."""


REPORTED = (LaunchError, CacheError, TransferError, IPCError, MetricsError, ModelLoadError, GenerationError)
