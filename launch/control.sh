#!/usr/bin/env bash
# Pauses, resumes, puts to sleep, wakes or clears the background server, or tells it of new weights:
#   control.sh pause | resume | sleep [--tier gpu|cpu] | wake | clear | update-weights [WEIGHTS_ID]  [--timeout SECONDS]
# Exit status 1 when it refuses or fails, 2 when an option is wrong, 3 when it is not running.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/service.sh"
if [ $# = 0 ] || help_wanted "$@"; then
    show_help "${BASH_SOURCE[0]}"
    exit 0
fi
check_arguments control --socket "$CONTROL_SOCKET" "$@"
if ! running_pid >/dev/null; then
    say "not running"
    exit 3
fi
exec "$VENV/bin/fastdeploy-cache" control --socket "$CONTROL_SOCKET" "$@"
