#!/usr/bin/env bash
# Sets up .venv and runs the tests. Arguments go on to pytest: ./launch/test.sh -k swap
#   --fast    only the tests that start no process, in two minutes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if help_wanted "$@"; then
    show_help "${BASH_SOURCE[0]}"
    exit 0
fi
install demo,test
say "pytest $*"
cd "$ROOT"
# Tests that start processes share what they start with others of their file; the rest go wherever a core is idle.
distribution=loadfile
[[ " $* " == *" --fast "* ]] && distribution=worksteal
exec "$PYTHON" -m pytest --numprocesses auto --maxprocesses 4 --dist "$distribution" "$@"
