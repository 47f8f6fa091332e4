"""A process that lends memory to a Mooncake cluster and changes objects behind a store's back.

Arguments: master's address, bytes to lend. Says `ready`; each line of standard input is `flip KEY` or `cut KEY`, and
`done` answers it.
"""

from __future__ import annotations

import sys

from mooncake.store import MooncakeDistributedStore


def main(address: str, lent_bytes: int) -> None:
    """Serve until standard input ends."""
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", lent_bytes, 16 * 2**20, "tcp", "", address)
    print("ready" if code == 0 else f"set-up returned {code}", flush=True)
    for line in sys.stdin:
        verb, key = line.split()
        value = bytearray(store.get(key))
        if verb == "flip":
            value[len(value) // 2] ^= 4
        codes = store.remove(key, True), store.put(key, bytes(value if verb == "flip" else value[:-9]))
        print("done" if codes == (0, 0) else f"{verb} came to {codes}", flush=True)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
