#!/usr/bin/env bash
# Starts a group in the background: instances that compute prompts, instances that answer, and a router before them.
#   start_prefill_decode.sh [--prefill N] [--decode N] [--prefill-ranks N] [--decode-ranks N]
#                           [--host ADDRESS] [--port PORT] [options of `fastdeploy-cache serve` for every instance]
#   start_prefill_decode.sh --status     exit status 3 when nothing of it runs, 4 when not all of it does
#   start_prefill_decode.sh --stop       SIGTERM, then SIGKILL after 30 seconds
# One of each with one rank, and the router at 127.0.0.1:8000, where nothing is said. Ports of instances are free ones.
# A member that ends is started again, with the options and ports that it had.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
call "${BASH_SOURCE[0]}" up "$@"
