#!/usr/bin/env bash
# Starts a group in the background: instances that compute prompts, instances that answer, and a router in front of them.
#   start_prefill_decode.sh [--prefill N] [--decode N] [--prefill-ranks N] [--decode-ranks N]
#                           [--host ADDRESS] [--port PORT] [options of `fastdeploy-cache serve` for every instance]
#   start_prefill_decode.sh --status     exit status 3 when nothing of it runs, 4 when not all of it does
#   start_prefill_decode.sh --stop       SIGTERM, then SIGKILL after 30 seconds
# One of each with one rank, and the router at 127.0.0.1:8000, where nothing is said. Ports of instances are free ones.
# Where some of it has died, a start without options starts what is missing, with the options and ports it had.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/service.sh"
if help_wanted "$@"; then
    show_help "${BASH_SOURCE[0]}"
    exit 0
fi
GROUP_DIR="$RUN_DIR/prefill_decode"
PEER_SECRET="$GROUP_DIR/peer.secret" # of this group alone: its instances sign their offers with it

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
    rm -f "$PEER_SECRET"
    return $killed
}

show_status() {
    local name url code metrics all=0
    any_runs || { say "not running"; exit 3; }
    for name in $(members); do
        url="$(field url "$LOG_DIR/$name.log")" || url=""
        if ! pid_in "$GROUP_DIR/$name.pid" >/dev/null; then
            say "$name: NOT RUNNING; its log is $LOG_DIR/$name.log; a start without options starts it again"
            all=4
            continue
        fi
        code="$(http_status "$url/ready")"
        if [ "$code" = 200 ]; then
            metrics="$(field metrics "$LOG_DIR/$name.log")" || metrics=""
            say "$name: up, API $url${metrics:+, metrics $metrics}"
        elif [ "$name $code" = "router 503" ]; then
            say "$name: up, no decode instance ready, API $url"
            all=4
        elif [ "$code" = 503 ]; then
            say "$name: up, not ready: paused or asleep, API $url"
            all=4
        else
            say "$name: DOES NOT ANSWER at $url; its log is $LOG_DIR/$name.log"
            all=4
        fi
    done
    exit $all
}

children=() interrupted=""

launch() { # launch NAME COMMAND...: in the background, without the lock
    local name="$1"
    shift
    printf '%s\0' "$@" >"$GROUP_DIR/$name.arguments"
    [ ! -s "$LOG_DIR/$name.log" ] || mv -f "$LOG_DIR/$name.log" "$LOG_DIR/$name.log.old" # why it died
    : >"$LOG_DIR/$name.log"
    # not ended between the start of a server and the note of its pid: nobody would know of it. Not ignored either: the
    # server would inherit that.
    trap 'interrupted=1' INT TERM
    nohup "$VENV/bin/fastdeploy-cache" "$@" </dev/null >>"$LOG_DIR/$name.log" 2>&1 9>&- &
    children+=("$!")
    printf '%s\n' "$!" >"$GROUP_DIR/$name.pid"
    trap 'exit 130' INT TERM
    [ -z "$interrupted" ] || exit 130
}

note_ports() { # note_ports NAME: started again it takes those that the others know; the last of an option counts
    local name="$1" metrics
    printf '%s\0' --port "${URL##*:}" >>"$GROUP_DIR/$name.arguments"
    metrics="$(field metrics "$LOG_DIR/$name.log")" || return 0
    metrics="${metrics%/metrics}"
    [ -z "$metrics" ] || printf '%s\0' --metrics-port "${metrics##*:}" >>"$GROUP_DIR/$name.arguments"
}

end_children() { # what this start has begun; by its pids, as a process that was just started is not known by its name
    local pid
    trap '' INT TERM
    for pid in "${children[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
    for _ in $(seq 300); do
        any_child_runs || break
        sleep 0.1
    done
    for pid in "${children[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
    wait
}

any_child_runs() {
    local pid
    for pid in "${children[@]}"; do kill -0 "$pid" 2>/dev/null && return 0; done
    return 1
}

start_missing() {
    local name arguments missing=()
    for name in $(members); do
        pid_in "$GROUP_DIR/$name.pid" >/dev/null || missing=("$name" "${missing[@]}") # the router last
    done
    [ ${#missing[@]} -gt 0 ] || die "already running; see --status, or stop it with --stop"
    [ "$has_options" = 0 ] || die "already running but for ${missing[*]}; start it without options to start those"
    install demo
    trap end_children EXIT
    for name in "${missing[@]}"; do
        [ -e "$GROUP_DIR/$name.arguments" ] || die "how $name was started is not known; stop the group with --stop"
        mapfile -d '' arguments <"$GROUP_DIR/$name.arguments"
        launch "$name" "${arguments[@]}"
    done
    for name in "${missing[@]}"; do
        wait_ready "$name"
        say "$name: up again, $URL"
    done
    trap - EXIT INT TERM
}

wait_ready() { # wait_ready NAME: sets URL
    local name="$1" log="$LOG_DIR/$1.log"
    for _ in $(seq 240); do
        if URL="$(field url "$log")" && [ -n "$URL" ] && get "$URL/ready" >/dev/null 2>&1; then return; fi
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

refuse_shared() { # refuse_shared OPTION WHY
    die "$1 is not for a whole group: $2"
}

has_options=$#
for argument in "$@"; do
    case "$argument" in --stop | --status) [ $# = 1 ] || refuse "$argument takes nothing beside it; got: $*" ;; esac
done
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
    --host=* | --port=*) router+=("$1") ;;
    --log-level | --log-format)
        [ $# -gt 1 ] || die "$1 needs a value"
        router+=("$1" "$2") serve+=("$1" "$2")
        shift
        ;;
    --log-level=* | --log-format=*) router+=("$1") serve+=("$1") ;;
    --role | --role=* | role=* | --set=role=*) refuse_shared "$1" "use --prefill N and --decode N" ;;
    --control-socket | --control-socket=*) refuse_shared "$1" "all would take one socket; start them one by one" ;;
    --metrics-port | --metrics-port=*) refuse_shared "$1" "each member takes a free port, which --status shows" ;;
    --log-dir | --log-dir=*) refuse_shared "$1" "each member has its own folder in $LOG_DIR" ;;
    peer.listen=* | --set=peer.listen=*) refuse_shared "$1" "all members would take one port; start them one by one" ;;
    peer.name=* | --set=peer.name=*) refuse_shared "$1" "each member has its own, which metrics show" ;;
    --stop) action=stop ;;
    --status) action=status ;;
    *) serve+=("$1") ;;
    esac
    shift
done
[ "$action" != status ] || show_status
if [ "$action" = start ]; then
    check_arguments serve "${serve[@]}"
    check_arguments route --decode http://127.0.0.1:1 "${router[@]}"
fi

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
if any_runs; then
    start_missing
    exit 0
fi
install demo
stop_group # what a group that died has left: pid files
trap 'end_children; rm -f "$GROUP_DIR"/*.pid "$PEER_SECRET"' EXIT # all of it or nothing, also when this is interrupted
trap 'exit 130' INT TERM
say "starting $num_prefill prefill and $num_decode decode (logs: $LOG_DIR)"
"$VENV/bin/fastdeploy-cache" peer-secret "$PEER_SECRET" >/dev/null || die "no secret can be made for the group"
names=()
for ((i = 0; i < num_prefill; i++)); do names+=("prefill-$i"); done
for ((i = 0; i < num_decode; i++)); do names+=("decode-$i"); done
for name in "${names[@]}"; do
    role="${name%-*}" ranks="${name%-*}_ranks"
    launch "$name" serve --role "$role" --ranks "${!ranks}" --port 0 --metrics-port 0 --log-dir "$LOG_DIR/$name" \
        --set "peer.name=$name" --set "peer.secret_file=$PEER_SECRET" "${serve[@]}"
done
for name in "${names[@]}"; do
    wait_ready "$name"
    note_ports "$name"
    say "$name: $URL, metrics $(field metrics "$LOG_DIR/$name.log")"
    router+=("--${name%-*}" "$URL")
done
launch router route "${router[@]}"
wait_ready router
note_ports router
trap - EXIT INT TERM
say "ready: API $URL/v1/chat/completions"
