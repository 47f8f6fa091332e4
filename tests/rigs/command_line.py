"""The command as a program of its own."""

from __future__ import annotations

import sys

CLI = [sys.executable, "-c", "from fastdeploy_cache.launch.cli import main; main()"]
