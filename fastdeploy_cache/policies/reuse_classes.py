"""The classes of blocks that `reuse` learns of, as numbers, and whose figures each leans on while it is small.

A number says which class it is: no two classes share one. How many are met is another matter (`ReuseHistory`).
"""

from __future__ import annotations

NUM_USES, NUM_TURNS, NUM_GAPS, NUM_LENGTHS = 6, 5, 4, 4
_END_PRIVATE = NUM_USES + NUM_TURNS * NUM_GAPS * NUM_LENGTHS
ENDED_CLASS, PENDING_CLASS = _END_PRIVATE, _END_PRIVATE + 1  # by hints of the engine
NUM_GOING = 5  # whether a request is said to be gone on with: nothing is said, or one of four chances
_HINTED, _SESSIONS, NUM_PAUSES = 128, 1024, 128  # the first numbers of each chance, of sessions, and how many these are
NUM_CLASSES = _SESSIONS + NUM_GOING * NUM_PAUSES


def shared_class(num_uses: int) -> int:
    """Blocks where prompts have parted behind: by uses 1, 2-3, 4-7, 8-15, 16-31, more."""
    return min(NUM_USES - 1, max(1, num_uses).bit_length() - 1)


def private_class(turn: int, gap: float, num_tokens: int, going: int = 0) -> int:
    """Blocks of one conversation: by turn 1, 2, 3-4, 5-8, more; by the last pause in milliseconds; by prompt length;
    and by the stated chance that it goes on."""
    turns = min(NUM_TURNS - 1, (turn - 1).bit_length())
    gaps = max(0, min(NUM_GAPS - 1, (int(gap).bit_length() - 11) // 2)) if turn > 1 else 0  # to 4 s, 16 s, 66 s
    lengths = min(NUM_LENGTHS - 1, (num_tokens >> 11).bit_length())  # below 2k, 4k, 8k
    return _HINTED * going + NUM_USES + (turns * NUM_GAPS + gaps) * NUM_LENGTHS + lengths


def session_class(pause: int, going: int) -> int:
    """Blocks of a session: by the pause that is expected, a bin of `SessionPauses`, and by the stated chance."""
    return _SESSIONS + NUM_PAUSES * going + pause


def ancestors_of(number: int) -> tuple[int, ...]:
    """The groups that a class leans on, the smallest one first, as numbers; behind them are all blocks."""
    if number >= _SESSIONS:
        return (NUM_CLASSES + (number - _SESSIONS) // NUM_PAUSES,)
    going, place = divmod(number, _HINTED)
    if place in (ENDED_CLASS, PENDING_CLASS):
        return ()
    if place < NUM_USES:
        return (0,)
    of_all_lengths = number - (place - NUM_USES) % NUM_LENGTHS
    return (of_all_lengths, NUM_CLASSES + NUM_GOING + going) if going else (of_all_lengths,)
