#!/usr/bin/env bash
# Ends the background server cleanly: SIGTERM, then SIGKILL after 30 seconds.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/service.sh"
take_no_arguments "${BASH_SOURCE[0]}" "$@"
if ! pid="$(running_pid)"; then
    rm -f "$PID_FILE"
    say "not running"
    exit 0
fi
kill -TERM "$pid"
for _ in $(seq 300); do
    if ! kill -0 "$pid" 2>/dev/null; then
        rm -f "$PID_FILE"
        say "stopped (pid $pid)"
        exit 0
    fi
    sleep 0.1
done
kill -KILL "$pid" 2>/dev/null || true
rm -f "$PID_FILE"
die "pid $pid did not end within 30 seconds and was killed; its log is $LOG_FILE"
