"""What a scrape shows of a live cache: what is on its way, what waits, how long things took, and the life cycle."""

from __future__ import annotations

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from tests.rigs.asker import Asker
from tests.rigs.storage_rig import A, Rig, stored

B = list(range(500, 541))


def shown(cache: PrefixCacheManager, name: str) -> dict[tuple[str, ...], float]:
    """The values of a series by those of its labels, but for zeros."""
    samples = [sample for family in cache.metrics.collect() for sample in family.samples]
    found = {
        tuple(value for label, value in sorted(sample.labels.items()) if label != "dp"): sample.value
        for sample in samples
        if sample.name == f"fastdeploy_cache_{name}"
    }
    assert found, f"no series {name}"
    return {labels: value for labels, value in found.items() if value}


def test_a_load_is_on_its_way_until_it_has_ended() -> None:
    """A match that waits for a load shows as waiting, and the load as in flight; when it has come it has a duration,
    and the request is settled with it."""
    asker = Asker(num_gpu=12, num_cpu=30, cpu_write_policy="write_through")
    asker.only_in_cpu(A, B)
    request, match = asker.match(A)
    assert shown(asker.cache, "tasks_in_flight") == {("swap_in",): 1}
    assert shown(asker.cache, "matched_requests") == {("waiting",): 1}
    before = shown(asker.cache, "task_duration_seconds_count")
    assert ("swap_in",) not in before
    asker.client.land_all()
    asker.admit(request, match)
    assert shown(asker.cache, "tasks_in_flight") == {}
    assert shown(asker.cache, "matched_requests") == {("settled",): 1}
    assert shown(asker.cache, "task_duration_seconds_count") == before | {("swap_in",): 1}
    asker.cache.release(request)
    assert shown(asker.cache, "matched_requests") == {}


def test_each_admitted_match_has_a_duration() -> None:
    """One that was released before it got blocks has none; one that is matched again after a preemption counts twice,
    as it was matched twice."""
    asker = Asker()
    request, _ = asker.match(A)
    asker.cache.release(request)
    assert shown(asker.cache, "match_duration_seconds_count") == {}
    for num_admitted in (1, 2):
        match = asker.cache.match(request)
        asker.cache.allocate(request, 11 - len(match.block_ids))
        asker.cache.release(request)
        assert shown(asker.cache, "match_duration_seconds_count") == {(): num_admitted}
    assert 0 < shown(asker.cache, "match_duration_seconds_sum")[()] < 10


def test_a_prefetch_has_a_duration_and_its_tasks_are_shown() -> None:
    """The question to storage is in flight, then the pieces are; the prefetch counts once, when it has ended."""
    rig = Rig(stored(A))
    cache = rig.model.cache
    rig.know(A)
    rig.prefetch(A)
    assert shown(cache, "tasks_in_flight") == {("lookup",): 1}
    assert shown(cache, "prefetch_duration_seconds_count") == {}
    rig.land_all()
    assert shown(cache, "tasks_in_flight") == {}
    assert shown(cache, "prefetch_duration_seconds_count") == {(): 1}
    durations = shown(cache, "task_duration_seconds_count")
    assert durations["lookup",] == 1 and durations["prefetch",] >= 1 and durations["probe",] == 1
    rig.finish()


def test_a_task_that_fails_is_not_in_flight_for_ever() -> None:
    """Its end is its end, well or not."""
    asker = Asker(num_gpu=12, num_cpu=30, cpu_write_policy="write_through")
    asker.only_in_cpu(A, B)
    request, _ = asker.match(A)
    while asker.client.tasks:
        asker.client.land("the rank has failed")
    assert shown(asker.cache, "tasks_in_flight") == {}
    assert shown(asker.cache, "task_duration_seconds_count")["swap_in",] == 1
    asker.cache.release(request)


def test_the_life_cycle_has_one_state() -> None:
    """It is 1 for the state that the cache is in, and 0 for all others."""
    with PrefixCacheManager(CacheConfig(num_gpu_blocks=8, num_cpu_blocks=8, transfer_client="inline")) as cache:
        assert shown(cache, "life_cycle_state") == {("running",): 1}
        cache.life.pause()
        assert shown(cache, "life_cycle_state") == {("paused",): 1}
        cache.life.resume()
        assert shown(cache, "life_cycle_state") == {("running",): 1}
