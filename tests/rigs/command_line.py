"""The command as a program of its own."""

from __future__ import annotations

import sys

CLI = [sys.executable, "-m", "fastdeploy_cache.launch"]
