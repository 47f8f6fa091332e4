#!/usr/bin/env bash
# Sets up .venv and runs the demo. Arguments go on to it: ./launch/quickstart.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
install demo
say "fastdeploy-cache demo $*"
exec "$VENV/bin/fastdeploy-cache" demo "$@"
