#!/usr/bin/env bash
# Ends the background server cleanly: SIGTERM, then SIGKILL after 30 seconds.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
call "${BASH_SOURCE[0]}" stop "$@"
