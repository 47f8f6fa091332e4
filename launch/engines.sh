#!/usr/bin/env bash
# Sets up a real engine in a virtual environment of its own, .engines/NAME, and runs it with this cache: vllm or
# sglang. About 1 GB is fetched for each, which is 3 to 4 GB on disk; no GPU is needed. See docs/engines.md.
#
# Usage: engines.sh vllm [--only-answers] [--json FILE]    20 minutes on two cores; only the answers: 13
#        engines.sh sglang [--json FILE]                   12 minutes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [ $# = 0 ] || help_wanted "$@"; then
    show_help "${BASH_SOURCE[0]}"
    exit 0
fi
case "$1" in vllm | sglang) ;; *) refuse "'$1' is not known here; the engine's name comes first: vllm or sglang" ;; esac
ENGINE="$1"
shift

ARGUMENTS=("$@") # of fastdeploy-cache, which is not installed yet: they are looked at here, before minutes of set-up
while [ $# -gt 0 ]; do
    case "$ENGINE $1" in
    "vllm --only-answers") shift ;;
    *" --json")
        [ -n "${2:-}" ] && [ "${2#--}" = "$2" ] || refuse "--json needs the name of a file"
        [ "$2" = - ] || { [ -d "$(dirname "$2")" ] && [ ! -d "$2" ]; } ||
            refuse "--json $2: the folder does not exist, or this is a folder"
        shift 2
        ;;
    *) refuse "'$1' is not known here; --help shows what $ENGINE takes" ;;
    esac
done

# refuse_unless_version NAME: a variable's value becomes part of a path that is removed
refuse_unless_version() {
    [[ "${!1}" =~ ^[0-9][0-9A-Za-z.]*$ ]] || refuse "$1='${!1}' is no version; give one such as 1.2.3"
}

# CI fails where an engine cannot be installed; elsewhere that is a reason to leave it out
cannot() {
    [ -z "${CI:-}" ] || die "$1"
    say "skipped: $1"
    exit 0
}
pip() { "$PYTHON" -m pip --quiet --disable-pip-version-check "$@" || cannot "pip $* failed; is a registry reachable?"; }

# new_environment NAME: an empty virtual environment in VENV, with PyTorch's build for CPUs
new_environment() {
    say "setting up $1 in $VENV (1 GB to fetch, 2 to 5 minutes)"
    rm -rf "$VENV"
    "$(find_python)" -m venv "$VENV" || cannot "python -m venv failed"
    pip install "torch==2.13.0"
}

# install_what_it_asks_for DISTRIBUTION NAME...: its requirements, without those named
install_what_it_asks_for() {
    "$PYTHON" - "$@" >"$VENV/requirements.txt" <<'EOF'
import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires(sys.argv[1]):
    wanted = Requirement(line)
    is_wanted = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    if is_wanted and wanted.name not in sys.argv[2:]:
        wanted.marker = None
        print(wanted)
EOF
    pip install --no-warn-conflicts -r "$VENV/requirements.txt"
}

source "$ROOT/launch/engines/$ENGINE.sh" # sets VENV and PYTHON, installs there, and sets ARGUMENTS
pip install --no-warn-conflicts -e "$ROOT"
say "fastdeploy-cache engines $ENGINE ${ARGUMENTS[*]}"
exec "$VENV/bin/fastdeploy-cache" engines "$ENGINE" "${ARGUMENTS[@]}"
