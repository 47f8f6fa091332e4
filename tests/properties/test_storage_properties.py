"""Random verbs over three tiers: no wrong byte is served and the books add up, whatever the store does."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rigs.storage_walk import OPERATIONS, Walk

steps = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 59)), max_size=120)


@settings(max_examples=120, deadline=None)
@given(
    steps,
    st.sampled_from([2, 4, 9, 24]),
    st.sampled_from(["write_back", "write_through"]),
    st.sampled_from(["write_through", "write_through_selective", "write_back"]),
    st.sampled_from(["wait_complete", "best_effort"]),
)
def test_any_order_of_verbs_and_failures(
    chosen: list[Any], num_cpu: int, write_policy: str, storage_policy: str, prefetch_policy: str
) -> None:
    """What is read is what was computed, hits are only on what was committed, and nothing stays owned at the end."""
    walk = Walk(num_cpu, write_policy, storage_policy, prefetch_policy)
    for operation, number in chosen:
        walk.step(operation, number)
    walk.finish()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("match", "serve", "finish", "drop", "flush")), st.integers(0, 59))))
def test_a_flush_says_yes_only_of_what_is_there(chosen: list[Any]) -> None:
    """Few verbs over a store that answers and drops objects: most walks get to a flush that could say yes."""
    walk = Walk(24, "write_through", "write_through", "wait_complete")
    for operation, number in [*chosen, ("drop", 1), ("flush", 1)]:
        walk.step("match", number)
        walk.step("serve", number)
        walk.step(operation, number)
        walk.land_all()
    walk.finish()
