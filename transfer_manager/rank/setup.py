"""What a rank's transfer process is told."""

from __future__ import annotations

from fastdeploy_cache.transfer_manager.device.base import DeviceSetup
from fastdeploy_cache.transfer_manager.process.setup import ProcessSetup


class RankSetup(ProcessSetup, frozen=True, kw_only=True):
    """Its CPU blocks, which it inherits, and its device."""

    cpu_fd: int
    device: DeviceSetup
