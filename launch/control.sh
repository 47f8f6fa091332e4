#!/usr/bin/env bash
# Pauses, resumes, puts to sleep, wakes or clears the background server, or tells it of new weights:
#   control.sh pause | resume | sleep [--tier gpu|cpu] | wake | clear | update-weights [WEIGHTS_ID]  [--timeout SECONDS]
# Exit status 1 when it refuses or fails, 2 when an option is wrong, 3 when it is not running.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[ $# != 0 ] || set -- --help
call "${BASH_SOURCE[0]}" control "$@"
