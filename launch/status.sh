#!/usr/bin/env bash
# Shows the background server's ranks, tiers and hit rates. Exit status 3 when it is not running, 4 when it does not answer.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/service.sh"
take_no_arguments "${BASH_SOURCE[0]}" "$@"
if ! pid="$(running_pid)"; then
    say "not running"
    exit 3
fi
url="$(field url)"
say "running: pid $pid, API $url/v1/chat/completions, metrics $(field metrics)"
answer="$(get "$url/status" 2>/dev/null)" || { say "it does not answer; its log is $LOG_FILE"; exit 4; }
printf '%s' "$answer" | "$PYTHON" -c '
import json, sys
status = json.load(sys.stdin)
if status["life_cycle"] != "running":
    print("life cycle: " + status["life_cycle"])
for rank in status["ranks"]:
    state = "up" if rank["up"] else "DOWN"
    print("rank {rank}: {state}, pid {pid}, restarts {num_restarts}".format(state=state, **rank))
for tier, states in status["tiers"].items():
    print(tier.upper() + ": " + ", ".join(f"{count} {state}" for state, count in states.items()))
if storage := status["storage"]:
    state = "open" if storage["available"] else "NOT OPEN"
    counts = ", ".join(f"{count} blocks {fate}" for fate, count in storage["blocks"].items())
    counts += "".join(f", {count} objects {reason}" for reason, count in storage["lost_objects"].items() if count)
    breakers = ", ".join(f"{operation} breaker {state}" for operation, state in storage["breakers"].items())
    print(f"storage: {state}; {counts}; {breakers}")
rates = status["hit_rates"]
print("hit rates, recently: " + ", ".join(f"{name} {rate:.0%}" for name, rate in rates.items()))
'
