# Sourced by start.sh, stop.sh, status.sh, control.sh and start_prefill_decode.sh: where servers in the background keep
# their things. Not run by itself.

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
RUN_DIR="${FASTDEPLOY_CACHE_RUN_DIR:-$ROOT/run}"
PID_FILE="$RUN_DIR/serve.pid"
LOG_DIR="$RUN_DIR/log"
LOG_FILE="$LOG_DIR/serve.log"
CONTROL_SOCKET="$RUN_DIR/control/serve.sock"
# The environment prefix FASTDEPLOY_CACHE_ belongs to configuration keys; the server must not see ours.
unset FASTDEPLOY_CACHE_RUN_DIR

# pid_in FILE: the pid in there, if it runs: when it still is one of ours.
pid_in() {
    local pid
    pid="$(cat "$1" 2>/dev/null)" || return 1
    [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null && grep -qa 'fastdeploy-cache' "/proc/$pid/cmdline" 2>/dev/null || return 1
    printf '%s' "$pid"
}

running_pid() { pid_in "$PID_FILE"; }

# field NAME [LOG]: the value of NAME= in the server's last "event=serving" line
field() { grep 'event=serving' "${2:-$LOG_FILE}" 2>/dev/null | tail -n 1 | grep -o "$1=[^ ]*" | cut -d= -f2-; }

# http_status URL: the number that it is answered with; nothing where nobody answers
http_status() {
    "$PYTHON" - "$1" <<'EOF'
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=5).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    pass
EOF
}

get() { "$PYTHON" -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())' "$1"; }
