#!/usr/bin/env bash
# Starts a group in the background: instances that compute prompts, instances that answer, and a router in front of them.
#   start_prefill_decode.sh [--prefill N] [--decode N] [--prefill-ranks N] [--decode-ranks N]
#                           [--host ADDRESS] [--port PORT] [options of `fastdeploy-cache serve` for every instance]
#   start_prefill_decode.sh --status     exit status 3 when nothing of it runs, 4 when not all of it does
#   start_prefill_decode.sh --stop       SIGTERM, then SIGKILL after 30 seconds
# One of each with one rank, and the router at 127.0.0.1:8000, where nothing is said.
set -euo pipefail
case " $* " in *" --help "*)
    sed -n '2,7s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/service.sh"
GROUP_DIR="$RUN_DIR/prefill_decode"

members() { # names that have a pid file: the router first, so that it takes nothing more
    local file
    for file in "$GROUP_DIR"/router.pid "$GROUP_DIR"/decode-*.pid "$GROUP_DIR"/prefill-*.pid; do
        [ -e "$file" ] && basename "$file" .pid
    done
    return 0
}

any_runs() {
    local name
    for name in $(members); do pid_in "$GROUP_DIR/$name.pid" >/dev/null && return 0; done
    return 1
}

stop_group() { # status 1 when one had to be killed
    local name pid killed=0
    for name in $(members); do
        if pid="$(pid_in "$GROUP_DIR/$name.pid")"; then kill -TERM "$pid" 2>/dev/null || true; fi
    done
    for _ in $(seq 300); do
        any_runs || break
        sleep 0.1
    done
    for name in $(members); do
        if pid="$(pid_in "$GROUP_DIR/$name.pid")"; then
            kill -KILL "$pid" 2>/dev/null || true
            say "$name (pid $pid) did not end within 30 seconds and was killed; its log is $LOG_DIR/$name.log"
            killed=1
        fi
        rm -f "$GROUP_DIR/$name.pid"
    done
    return $killed
}

show_status() {
    local name url all=0
    any_runs || { say "not running"; exit 3; }
    for name in $(members); do
        url="$(field url "$LOG_DIR/$name.log")" || url=""
        if ! pid_in "$GROUP_DIR/$name.pid" >/dev/null; then
            say "$name: NOT RUNNING; its log is $LOG_DIR/$name.log"
            all=4
        elif get "$url/health" >/dev/null 2>&1; then
            say "$name: up, $url"
        else
            say "$name: DOES NOT ANSWER at $url; its log is $LOG_DIR/$name.log"
            all=4
        fi
    done
    exit $all
}

launch() { # launch NAME COMMAND...: in the background, without the lock
    local name="$1"
    shift
    : >"$LOG_DIR/$name.log"
    nohup "$VENV/bin/fastdeploy-cache" "$@" </dev/null >>"$LOG_DIR/$name.log" 2>&1 9>&- &
    printf '%s\n' "$!" >"$GROUP_DIR/$name.pid"
}

wait_ready() { # wait_ready NAME: sets URL
    local name="$1" log="$LOG_DIR/$1.log"
    for _ in $(seq 240); do
        if URL="$(field url "$log")" && [ -n "$URL" ] && get "$URL/health" >/dev/null 2>&1; then return; fi
        if ! kill -0 "$(cat "$GROUP_DIR/$name.pid")" 2>/dev/null; then
            tail -n 5 "$log" >&2
            die "$name ended while starting; its log is $log"
        fi
        sleep 0.5
    done
    die "$name was not ready within two minutes; its log is $log"
}

number() { # number OPTION VALUE
    case "$2" in "" | *[!0-9]* | 0*) die "$1 is '$2'; give a number from 1 on" ;; esac
    printf '%s' "$2"
}

num_prefill=1 num_decode=1 prefill_ranks=1 decode_ranks=1 action=start router=() serve=()
while [ $# -gt 0 ]; do
    case "$1" in
    --prefill) num_prefill="$(number "$1" "${2:-}")" || exit 1; shift ;;
    --decode) num_decode="$(number "$1" "${2:-}")" || exit 1; shift ;;
    --prefill-ranks) prefill_ranks="$(number "$1" "${2:-}")" || exit 1; shift ;;
    --decode-ranks) decode_ranks="$(number "$1" "${2:-}")" || exit 1; shift ;;
    --host | --port)
        [ $# -gt 1 ] || die "$1 needs a value"
        router+=("$1" "$2")
        shift
        ;;
    --stop) action=stop ;;
    --status) action=status ;;
    *) serve+=("$1") ;;
    esac
    shift
done
[ "$action" != status ] || show_status

mkdir -p "$LOG_DIR" "$GROUP_DIR"
# One start or stop at a time; the lock goes with this script, not with the servers.
exec 9>"$GROUP_DIR/lock"
flock -n 9 || die "another start_prefill_decode.sh is at work"
if [ "$action" = stop ]; then
    any_runs || { stop_group; say "not running"; exit 0; }
    stop_group || die "not all of it ended by itself"
    say "stopped"
    exit 0
fi
any_runs && die "already running; see --status, or stop it with --stop"
install demo
stop_group # what a group that died has left: pid files
trap 'stop_group || true' EXIT # all of it or nothing, also when this is interrupted
trap 'exit 130' INT TERM
say "starting $num_prefill prefill and $num_decode decode (logs: $LOG_DIR)"
names=()
for ((i = 0; i < num_prefill; i++)); do names+=("prefill-$i"); done
for ((i = 0; i < num_decode; i++)); do names+=("decode-$i"); done
for name in "${names[@]}"; do
    role="${name%-*}" ranks="${name%-*}_ranks"
    launch "$name" serve --role "$role" --ranks "${!ranks}" --port 0 --metrics-port 0 --log-dir "$LOG_DIR/$name" \
        "${serve[@]}"
done
for name in "${names[@]}"; do
    wait_ready "$name"
    say "$name: $URL, metrics $(field metrics "$LOG_DIR/$name.log")"
    router+=("--${name%-*}" "$URL")
done
launch router route "${router[@]}"
wait_ready router
trap - EXIT INT TERM
say "ready: API $URL/v1/chat/completions"
