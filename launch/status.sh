#!/usr/bin/env bash
# Shows the background server's ranks, tiers and hit rates. Exit status 3: it is not running; 4: it does not answer.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
call "${BASH_SOURCE[0]}" status "$@"
