"""Random copies of a caller's blocks and units of a hybrid model, against a model of what each of them holds."""

from __future__ import annotations

from tests.rigs.row_caller_walk import RowCaller


def test_random_walks_of_callers_with_rows() -> None:
    """50 stories with copies that are late, fail, or meet a reset: no wrong byte, nothing lost; everything happens."""
    total: dict[str, int] = {}
    for seed in range(50):
        caller = RowCaller(seed)
        for _ in range(1500):
            caller.step()
        caller.finish()
        for name, count in caller.num_moved.items():
            total[name] = total.get(name, 0) + count
    assert all(count > 60 for count in total.values()), total
