"""Tenants with shares under random verbs: nobody pushes another one below what it is guaranteed."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastdeploy_cache.books.run import GPU, TIERS, Run, Tier
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.books.tenants.shares import Shares
from fastdeploy_cache.config.cache import WRITE_POLICIES
from fastdeploy_cache.config.tenants import TenantConfig
from fastdeploy_cache.policies import EVICTION_POLICIES
from tests.rigs.cache_model import CacheModel, LiveRequest

NAMESPACES = ("", "", "other", "quiet", "narrow")
TENANTS = (
    TenantConfig(namespace="quiet", guaranteed_gpu_share=0.3, guaranteed_cpu_share=0.3),
    TenantConfig(namespace="narrow", guaranteed_gpu_share=0.1, max_gpu_share=0.4, max_cpu_share=0.25),
)
ERRORS = (None, None, None, "rank died")


class Guarantees:
    """Hears of each eviction, and who has asked for it: no other tenant falls below what it is guaranteed."""

    def __init__(self, model: CacheModel) -> None:
        residency = model.cache._books.residency
        assert residency.shares is not None
        self.shares, self.num_heard = residency.shares, 0
        self._asker: int | None = None
        self._named, self.shares.next_victim = self.shares.next_victim, self.next_victim  # type: ignore[method-assign]
        residency.taps.left = (*residency.taps.left, self.left)
        residency.taps.left_whole += (self.left,)

    def next_victim(self, tier: Tier, num_blocks: int, tenant: int | None) -> tuple[Run, int] | None:
        self._asker = tenant
        return self._named(tier, num_blocks, tenant)

    def left(self, run: Run, tier: Tier, _first: int, num_blocks: int, why: Loss) -> None:
        """A tap. The blocks are still counted as used, or have just been freed; what goes with a block of the other
        tier, which it continues, is not what was asked for."""
        if why is (Loss.CPU if tier else Loss.GPU) and self._asker not in {None, run.tenant}:
            self.num_heard += 1
            least = self.shares.shares[run.tenant].num_guaranteed[tier]
            assert self.shares.num_used(tier, run.tenant) >= least, "pushed below its guarantee"


def _check_limits(model: CacheModel, shares: Shares) -> None:
    """No tenant uses more than its most; what can be had is never more than what is there."""
    for tenant, share in enumerate(shares.shares):
        for tier in TIERS:
            assert shares.num_used(tier, tenant) <= share.num_most[tier], (tenant, tier, "more than its share")
            assert 0 <= shares.num_available(tier, tenant) <= model.cache._books.pools[tier].num_blocks


_ACTIONS = {"serve": 9, "match": 4, "live": 12, "land": 6, "down": 0.4, "reset": 0.1, "kv lost": 0.1, "forget": 0.4}


def _walk(model: CacheModel, choose: random.Random) -> None:
    """One step of a mixed crowd; now and then a death, a reset, or the loss of the GPU's bytes."""
    (action,) = choose.choices(list(_ACTIONS), list(_ACTIONS.values()))
    model.client.up = action != "down"
    text = [choose.choice((0, 1, 2))] * choose.randint(1, 12)
    text += [choose.randint(0, 4) for _ in range(choose.randint(0, 30))]
    namespace = choose.choice(NAMESPACES)
    if action == "land":
        model.land(choose.choice(ERRORS), choose.randint(1, 4))
    elif action == "reset":
        model.reset()
    elif action == "kv lost":
        model.kv_lost()
    elif action == "forget":
        model.forget(namespace)
    elif action == "match":
        model.match(text, namespace)
    elif action == "live" and model.live:
        _walk_on(model, choose, choose.choice(model.live))
    else:
        model.serve(text, choose.random() < 0.2, choose.random() < 0.7, namespace=namespace)


def _walk_on(model: CacheModel, choose: random.Random, live: LiveRequest) -> None:
    """A request that is there goes on, or ends."""
    how = choose.random()
    if how < 0.3:
        model.allocate(live, choose.randint(0, 6))
    elif how < 0.6:
        model.compute_some(live, choose)
    elif how < 0.7:
        model.run_ahead(live, choose.randint(0, 3))
    else:
        model.release(live)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    num_gpu=st.integers(10, 40),
    num_cpu=st.sampled_from([60, 15, 0]),
    policy=st.sampled_from(EVICTION_POLICIES),
    write_policy=st.sampled_from(WRITE_POLICIES),
)
def test_nobody_is_pushed_below_its_guarantee(
    seed: int, size: int, num_gpu: int, num_cpu: int, policy: str, write_policy: str
) -> None:
    """Hundreds of steps of all tenants, with deaths and resets: guarantees and limits hold, and the books add up."""
    model = CacheModel(size, num_gpu, num_cpu, policy=policy, write_policy=write_policy, tenants=TENANTS)
    guarantees, choose = Guarantees(model), random.Random(seed)
    for _ in range(300):
        _walk(model, choose)
        model.check()
        _check_limits(model, guarantees.shares)
    model.finish()


def test_walks_do_evict_for_others() -> None:
    """The walk above is worth something: tenants lose hundreds of blocks to others, down to their guarantees."""
    model, choose = CacheModel(1, 40, 40, write_policy="write_back", tenants=TENANTS), random.Random(3)
    guarantees = Guarantees(model)
    for _ in range(2000):
        _walk(model, choose)
    model.finish()
    assert guarantees.num_heard > 100


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(EVICTION_POLICIES),
    write_policy=st.sampled_from(WRITE_POLICIES),
    flooding=st.sampled_from(["", "narrow", "other"]),
)
def test_a_flood_leaves_a_quiet_tenant_its_prefixes(seed: int, policy: str, write_policy: str, flooding: str) -> None:
    """A quiet tenant caches what it is guaranteed; whatever another one computes then, its prompt is hit whole."""
    model, choose = (
        CacheModel(2, 40, 40, policy=policy, write_policy=write_policy, tenants=TENANTS),
        random.Random(seed),
    )
    prompt = [choose.randint(0, 4) for _ in range(24)]  # 12 blocks: three tenths of 40
    model.serve(prompt, stays=False, patient=True, namespace="quiet")
    for _ in range(choose.randint(5, 40)):
        text = [choose.randint(5, 9) for _ in range(choose.randint(2, 30))]
        model.serve(text, stays=False, patient=True, namespace=flooding)
        model.client.land_all()
        model.check()
    live = model.must_match([*prompt, 0], "quiet")
    assert live.match.num_gpu_tokens == 24
    model.finish()


def test_all_that_can_be_had_is_had() -> None:
    """Each tenant gets as many blocks as `num_available` says, and is refused one more without a trace."""
    choose = random.Random(7)
    for seed in range(30):
        model = CacheModel(2, 40, 10 * (seed % 3), write_policy="write_back", tenants=TENANTS)
        shares = Guarantees(model).shares
        for _ in range(60):
            _walk(model, choose)
        for live in list(model.live):
            model.release(live)
        namespace = NAMESPACES[seed % len(NAMESPACES)]
        for _ in range(3):
            live = model.must_match([10 + seed], namespace)
            num_room = shares.num_available(GPU, shares.tenant_of(namespace))
            assert not model.allocate(live, num_room + 1)
            assert model.allocate(live, num_room)
            assert shares.num_available(GPU, shares.tenant_of(namespace)) == 0
            if len(model.live) > 1:
                model.release(live)
        model.finish()
