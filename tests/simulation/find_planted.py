"""`python -m tests.simulation.find_planted [NAME ...]`: look for each planted fault, and write after how many steps it
was found into `found.json`. CI begins its own search at the stories that are written there."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from fastdeploy_cache.launch.faults.search import search
from tests.rigs.fault_watches import mirrored
from tests.simulation.planted import ALL
from tests.simulation.planting import Planted, in_place

FOUND_FILE = Path(__file__).with_name("found.json")
MOST_STEPS = 1_000_000


def find(planted: Planted, first_seed: int, most_steps: int) -> dict[str, Any] | None:
    """The first story in which it shows: its seed, what was found, the steps of the search; None: in none."""
    with in_place(planted):
        for so_far in search(first_seed=first_seed, watches=(mirrored,)):
            for found in so_far.found:
                return {"seed": found.story.seed, "kind": found.finding.kind, "num_steps": so_far.num_steps}
            if so_far.num_steps >= most_steps:
                return None
    raise AssertionError("a search never ends by itself")


def known() -> dict[str, dict[str, Any]]:
    """What was found before, by the fault's name."""
    found: dict[str, dict[str, Any]] = json.loads(FOUND_FILE.read_text())
    return found


def main(names: list[str]) -> int:
    """Look for these, or for all; the number of those that were not found, or 2 where one is not known."""
    if unknown := set(names).difference(planted.name for planted in ALL):
        print(f"no such planted fault: {', '.join(sorted(unknown))}; they are in tests/simulation/planted.py")
        return 2
    gc.freeze()  # what is loaded stays: the look for a story's garbage need not go over it
    table, num_missing = known() if names and FOUND_FILE.exists() else {}, 0
    for planted in ALL:
        if names and planted.name not in names:
            continue
        found = find(planted, 0, MOST_STEPS)
        print(f"{planted.name}: {found or 'not found'}", flush=True)
        num_missing += found is None
        if found is not None:
            table[planted.name] = found
    in_order = {planted.name: table[planted.name] for planted in ALL if planted.name in table}
    FOUND_FILE.write_text(json.dumps(in_order, indent=1) + "\n")
    return num_missing


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
