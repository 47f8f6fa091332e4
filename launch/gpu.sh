#!/usr/bin/env bash
# Runs what this project has of CUDA on this machine's NVIDIA GPU, in under 8 minutes, and writes gpu_report.json.
# It needs no network: what .venv, or else the machine's python3, has not is installed into run/gpu-packages where pip
# can, and named in the report where it cannot. --wheels FOLDER installs from a folder of wheels. See docs/gpu.md.
# FASTDEPLOY_CACHE_PYTHON=/path/to/python takes that Python.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if help_wanted "$@"; then
    show_help "${BASH_SOURCE[0]}"
fi
PYTHON="${FASTDEPLOY_CACHE_PYTHON:-$PYTHON}"
[ -x "$PYTHON" ] || PYTHON="$(find_python)"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$PYTHON" -P -m fastdeploy_cache.launch.gpu --packages "$ROOT/run/gpu-packages" "$@"
