"""Random stories of two instances between which blocks go, against the simple model: wrong KV is never found, whatever
comes late, fails or is cancelled, and the books of both sides add up after each step."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from fastdeploy_cache import KVLayout, PeerConfig, Receive, Request, Send, TransferConfig
from fastdeploy_cache.errors import OutOfBlocksError, PeerError, PeerRefusedError, RequestError
from tests.rigs.cache_model import CacheModel, LiveRequest
from tests.rigs.simulated_peers import SimReceive, SimulatedPeers

TEXTS = [[(5 * i * i + text * (i // 7)) % 4 for i in range(48)] for text in range(4)]
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2)


@dataclass
class Story:
    """Instance a computes and offers, b receives; both also serve requests of their own."""

    choose: random.Random
    a: CacheModel
    b: CacheModel
    sends: list[tuple[Send, list[int]]] = field(default_factory=list)
    receives: list[tuple[Receive, Request, int]] = field(default_factory=list)  # with b's epoch
    counts: Counter[str] = field(default_factory=Counter)
    ahead: dict[str, int] = field(default_factory=dict)  # tokens that a's requests computed ahead of their loads
    num_requests: int = 0
    num_steps: int = 0

    def text(self) -> list[int]:
        return self.choose.choice(TEXTS)[: self.choose.randint(1, 44)]

    def serve(self) -> None:
        model = self.choose.choice([self.a, self.b])
        model.serve(self.text(), stays=False, patient=self.choose.random() < 0.7)

    def offer(self) -> None:
        runs_ahead = self.choose.random() < 0.5
        if runs_ahead:  # of what comes from the CPU tier, that is
            self.a.client.land_all()
            self.a.cache.blocks.evict(30)
        live = self.a.match(self.text())
        if live is None:
            return
        if not self.has_blocks(live, runs_ahead=runs_ahead):
            self.a.release(live)
            return
        try:
            send = self.a.cache.peers.offer(live.request)
        except RequestError:
            assert live.request.num_tokens < self.a.size
        except PeerError:
            assert live.epoch != self.a.epoch or len(self.sends) >= 3 or not self.a.peers or not self.a.peers.up
        else:
            self.sends.append((send, list(memoryview(live.request.tokens).cast("i"))))

    def has_blocks(self, live: LiveRequest, *, runs_ahead: bool) -> bool:
        """Whether the rest of the request's blocks can be had; one that runs ahead does not wait for its loads."""
        num_blocks = -(-live.request.num_tokens // self.a.size)
        if not runs_ahead:
            return self.a.allocate(live, num_blocks - len(self.a.settle(live)))
        match = live.match.poll()
        return self.a.run_ahead(live, num_blocks - len(match.block_ids) - len(match.coming_block_ids))

    def compute(self) -> None:
        if not self.a.live:
            return
        live = self.choose.choice(self.a.live)
        if live.num_assumed and live.request.request_id not in self.ahead and self.choose.random() < 0.7:
            self.compute_ahead(live)
        elif (not live.num_assumed or self.choose.random() < 0.4) and self.confirm(live):
            upto = self.choose.randint(live.num_computed, live.request.num_tokens)
            self.num_steps += 1
            self.a.cache.peers.begin_step(live.request, upto, self.num_steps)
            self.a.compute(live, upto)

    def compute_ahead(self, live: LiveRequest) -> None:
        """On what may never come: until it is confirmed, whoever reads the result reads what is wrong."""
        assert live.table is not None
        most = live.request.num_tokens
        upto = self.ahead[live.request.request_id] = self.choose.choice(
            [most, self.choose.randint(live.num_computed, most)]
        )
        self.num_steps += 1
        self.a.cache.peers.begin_step(live.request, upto, self.num_steps)
        for block_id in live.table[live.num_computed // self.a.size : upto // self.a.size]:
            self.a.client.gpu[block_id] = "computed on a guess"
        self.a.cache.commit(live.request, upto)
        self.counts["ahead"] += 1

    def confirm(self, live: LiveRequest) -> bool:
        """Wait for its loads, if it has not; False where they have not come, and it has ended."""
        upto = self.ahead.pop(live.request.request_id, 0)
        table = self.a.settle(live)
        for block in range(live.num_computed // self.a.size, upto // self.a.size):
            self.a.client.gpu[table[block]] = self.a.prefix(live, block + 1)
        live.num_computed = max(live.num_computed, upto)
        self.counts["misguessed"] += live not in self.a.live
        return live in self.a.live

    def release(self) -> None:
        if self.a.live:
            live = self.choose.choice(self.a.live)
            if self.choose.random() < 0.6 and self.confirm(live):
                self.a.compute(live, live.request.num_tokens)
            if live in self.a.live:
                self.a.release(live)

    def receive(self) -> None:
        if not self.sends:
            return
        send, tokens = self.choose.choice(self.sends)
        self.num_requests += 1
        if self.choose.random() < 0.1:
            with pytest.raises(PeerRefusedError):
                self.b.cache.peers.receive(Request(request_id="other", prompt_token_ids=[9, *tokens[1:]]), send.offer)
        request = Request(request_id=f"b{self.num_requests}", prompt_token_ids=tokens)
        before = self.b.cache.stats().gpu
        try:
            receive = self.b.cache.peers.receive(request, send.offer)
        except OutOfBlocksError as refused:
            self.counts["full"] += 1
            assert (refused.missing > 0, self.b.cache.stats().gpu.num_in_flight) == (True, before.num_in_flight)  # noqa: PT017
        except PeerError:
            assert len(self.b.cache.peers.road.receives) >= 8  # type: ignore[union-attr]
        else:
            self.receives.append((receive, request, self.b.epoch))

    def network(self) -> None:
        """Something happens between the instances."""
        for end in (self.a.peers, self.b.peers):
            assert end is not None
            for send in list(end.sends.values()):
                chance = self.choose.random()
                if (send.is_over and chance < 0.5) or (send.why and chance < 0.5) or chance < 0.02:
                    end.end_send(send, None if send.is_over and not send.why else send.why or "late: nobody came")
            for receive in list(end.receives):
                self.go_on(end, receive)

    def go_on(self, end: SimulatedPeers, receive: SimReceive) -> None:
        chance = self.choose.random()
        if chance < 0.5:
            end.read(receive, self.choose.randint(1, 6))
        elif chance < 0.8:
            end.confirm(receive)
        elif receive.is_cancelled or chance < 0.83 or receive.send is None:
            end.fail(receive, "gone: it fell silent")

    def note_received(self) -> None:
        for each in [each for each in self.receives if each[0].done]:
            receive, request, epoch = each
            self.receives.remove(each)
            if not receive.succeeded:
                self.counts["failed"] += 1
            elif epoch == self.b.epoch:
                self.counts["received"] += receive.num_blocks > 0
                live = LiveRequest(request, None, epoch)  # type: ignore[arg-type]
                num_blocks = request.num_tokens // self.b.size
                self.b.committed |= {self.b.prefix(live, n + 1) for n in range(num_blocks)}
                if self.choose.random() < 0.6:
                    self.match_received(request, num_blocks)
            if self.choose.random() < 0.7:  # else it stays pinned for a while
                self.b.cache.peers.cancel_receive(request)

    def match_received(self, request: Request, num_blocks: int) -> None:
        match = self.b.cache.match(request)
        live = LiveRequest(request, match, self.b.epoch)
        self.b.check_readable(live, match.block_ids)
        most = (request.num_tokens - 1) // self.b.size
        assert match.num_gpu_tokens == min(num_blocks, most) * self.b.size, "what was received is all there"
        self.b.cache.release(request)

    def cancel(self) -> None:
        if self.receives and self.choose.random() < 0.5:
            self.b.cache.peers.cancel_receive(self.choose.choice(self.receives)[1])
        elif self.sends:
            self.a.cache.peers.cancel_send(self.choose.choice(self.sends)[0])

    def forget_sends(self) -> None:
        done = [each for each in self.sends if each[0].done]
        self.counts["sent"] += sum(send.succeeded for send, _ in done)
        if self.choose.random() < 0.5:  # offers of ended sends are tried as well
            self.sends = [each for each in self.sends if not each[0].done]

    def upset(self) -> None:
        model = self.choose.choice([self.a, self.b])
        self.choose.choice([model.reset, model.kv_lost])()

    def land(self) -> None:
        for model in (self.a, self.b):
            model.land(self.choose.choice([None, None, None, "the rank died"]), self.choose.randint(0, 3))

    def check(self) -> None:
        self.note_received()
        self.forget_sends()
        for model in (self.a, self.b):
            model.check()

    def finish(self) -> None:
        for _ in range(60):
            self.network()
            self.note_received()
        for _, request, _ in self.receives:
            self.b.cache.peers.cancel_receive(request)
        for i in range(1, self.num_requests + 1):
            self.b.cache.peers.cancel_receive(Request(request_id=f"b{i}", prompt_token_ids=[1]))
        for end in (self.b.peers, self.a.peers):
            assert end is not None
            end.stop()
        for model in (self.a, self.b):
            model.finish()


_STEPS = {
    "serve": 3, "offer": 3, "compute": 5, "release": 3, "receive": 4, "network": 10, "cancel": 0.7, "upset": 0.15,
    "land": 3,
}  # fmt: skip


def walk(seed: int, num_steps: int) -> Story:
    """One random story."""
    choose = random.Random(seed)
    network: list[SimulatedPeers] = []

    def model(name: str, num_gpu: int, num_cpu: int) -> CacheModel:
        config = PeerConfig(weights_id="w", name=name, max_transfers=3 if name == "a" else 8)
        return CacheModel(
            4,
            num_gpu,
            num_cpu,
            peers=lambda memory: SimulatedPeers(name, network, memory),
            layout=LAYOUT,
            peer=config,
            write_policy=choose.choice(["write_back", "write_through"]),
            transfer=TransferConfig(),
        )

    a, b = (model(name, choose.randint(14, 40), choose.choice([0, 20, 40])) for name in ("a", "b"))
    story = Story(choose, a, b)
    names, weights = list(_STEPS), list(_STEPS.values())
    for _ in range(num_steps):
        getattr(story, choose.choices(names, weights)[0])()
        story.check()
    story.finish()
    return story


@pytest.mark.parametrize("seed", range(40))
def test_random_stories_of_two_instances(seed: int) -> None:
    """See the module."""
    walk(seed, 150)


def test_the_stories_do_what_they_are_about() -> None:
    """Blocks are sent, received, refused for want of room, fail, and are computed ahead of loads that may fail."""
    total: Counter[str] = Counter()
    for seed in range(100, 140):
        total += walk(seed, 150).counts
    assert all(total[name] >= 3 for name in ("sent", "received", "failed", "full", "ahead", "misguessed")), total
