#!/usr/bin/env bash
# Starts `fastdeploy-cache serve` in the background and waits until it is ready. Arguments go on to it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/service.sh"
if help_wanted "$@"; then
    show_help "${BASH_SOURCE[0]}" serve
    exit 0
fi
check_arguments serve "$@"
mkdir -p "$LOG_DIR"
# One start at a time; the lock goes with this script, not with the server.
exec 9>"$RUN_DIR/start.lock"
flock -n 9 || die "another start.sh is running"
if pid="$(running_pid)"; then
    die "already running with pid $pid; see launch/status.sh, or stop it with launch/stop.sh"
fi
install demo
say "starting fastdeploy-cache serve $* (log: $LOG_FILE)"
: >"$LOG_FILE"
nohup "$VENV/bin/fastdeploy-cache" serve --log-dir "$LOG_DIR" --control-socket "$CONTROL_SOCKET" "$@" \
    </dev/null >>"$LOG_FILE" 2>&1 9>&- &
pid=$!
printf '%s\n' "$pid" >"$PID_FILE"
for _ in $(seq 240); do
    if url="$(field url)" && [ -n "$url" ] && get "$url/ready" >/dev/null 2>&1; then
        say "ready: pid $pid, API $url/v1/chat/completions, metrics $(field metrics)"
        exit 0
    fi
    if ! kill -0 "$pid" 2>/dev/null; then
        rm -f "$PID_FILE"
        tail -n 5 "$LOG_FILE" >&2
        die "the server ended while starting; its log is $LOG_FILE"
    fi
    sleep 0.5
done
kill "$pid" 2>/dev/null || true
rm -f "$PID_FILE"
die "the server was not ready within two minutes; its log is $LOG_FILE"
