#!/usr/bin/env bash
# Sets up .venv and runs the demo. Arguments go on to it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if help_wanted "$@"; then
    show_help "${BASH_SOURCE[0]}" demo
    exit 0
fi
check_arguments demo "$@"
install demo
say "fastdeploy-cache demo $*"
exec "$VENV/bin/fastdeploy-cache" demo "$@"
