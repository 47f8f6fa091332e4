#!/usr/bin/env bash
# Starts `fastdeploy-cache serve` in the background and waits until it is ready. Arguments go on to it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
call "${BASH_SOURCE[0]}" start "$@"
