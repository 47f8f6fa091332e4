"""Two engines of the float64 model that hand prompts over a link, whose reads happen when the test says so."""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from typing import Any

import numpy as np

from fastdeploy_cache import PeerConfig, PrefixCacheManager
from fastdeploy_cache.errors import OutOfBlocksError, PeerError, RequestError
from fastdeploy_cache.peers.transfers import Receive, Send
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from tests.rigs.float64_engine import Float64Engine, Served
from tests.rigs.float64_model import BLOCK, VOCABULARY
from tests.rigs.simulated_peers import SimReceive, SimulatedPeers


class RowArrays(MutableSequence[object]):
    """The content of each block, or unit, of one row of an engine's memory. What is no content is garbage."""

    def __init__(self, cache: PrefixCacheManager, layout: RankLayout, row: int) -> None:
        views = cache.ranks.kv_views(0)
        of_row = [views[layer] for layer in range(layout.num_layers) if layout.row_of(layer) == row]
        self._arrays = [array for in_layer in of_row for array in in_layer.values()]

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, unit: Any) -> object:
        return [array[unit].copy() for array in self._arrays]

    def __setitem__(self, unit: Any, content: Any) -> None:
        for number, array in enumerate(self._arrays):
            array[unit] = 3e4 if isinstance(content, str) else content[number]

    def __delitem__(self, unit: Any) -> None:
        raise AssertionError("memory does not shrink")

    def insert(self, index: int, value: object) -> None:
        raise AssertionError("memory does not grow")


def linked_engine(name: str, network: list[SimulatedPeers], seed: int, **fields: Any) -> Float64Engine:
    """One of the instances of a network."""
    client = SimulatedPeers(name, network, [])
    given: dict[str, Any] = {"num_gpu_blocks": 17, "num_gpu_units": (5, 9, 12), "num_cpu_blocks": 30}
    peer = PeerConfig(weights_id="float64", name=name)
    engine = Float64Engine(seed=seed, peer_client=client, peer=peer, **{**given, **fields})
    layout = engine.cache.config.rank_layout()
    assert layout is not None
    memory = [RowArrays(engine.cache, layout, row) for row in range(len(layout.rows))]
    client.memory, client.rows = memory[0], memory[1:]
    client.num_units = lambda boundary: [row.num_units_at(boundary) for row in layout.rows[1:]]
    return engine


class HandOver:
    """One prompt: computed and offered by the first engine, received and gone on with by the second."""

    def __init__(self, prompt: list[int], prefilled: Served, send: Send) -> None:
        self.prompt, self.send = prompt, send
        self.prefilled: Served | None = prefilled
        self.receive: Receive | None = None
        self.request: Any = None
        self.epoch = 0  # of the second engine, when the receive began
        self.decoded: Served | None = None

    @property
    def is_over(self) -> bool:
        """Nothing of it is left on either side."""
        return self.prefilled is None and self.send.done and self.request is None and self.decoded is None


class LinkWalk:
    """What two instances and the link between them may do, a step at a time, in any order."""

    def __init__(self, seed: int) -> None:
        self._network: list[SimulatedPeers] = []
        self.prefill = linked_engine("prefill", self._network, seed)
        self.decode = linked_engine("decode", self._network, seed + 1)
        self._draw = self.prefill.random
        self._live: list[HandOver] = []
        self._epoch = 0  # of the second engine: resets
        self.num_offers = self.num_came = self.num_whole = self.num_short = 0
        self._systems = [[self._draw.randrange(VOCABULARY) for _ in range(length)] for length in (9, 14)]

    def run(self, num_steps: int) -> None:
        """Take steps, then let all come to its end."""
        for _ in range(num_steps):
            draw = self._draw.random()
            if draw < 0.06 and len(self._live) < 4:
                self._offer()
            elif draw < 0.06 + 0.6 * bool(self._live):
                self._go_on(self._draw.choice(self._live))
            elif draw < 0.985:
                self._link()
            else:
                self._trouble()
            self._live = [each for each in self._live if not each.is_over]
            self.check()
        self._drain()

    def check(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.cache.check_invariants()

    def _offer(self) -> None:
        prompt = [*self._draw.choice(self._systems)]
        prompt += [self._draw.randrange(VOCABULARY) for _ in range(self._draw.randint(0, 14))]
        served = self.prefill.begin(prompt, 0)
        try:
            send = self.prefill.cache.peers.offer(served.request)
        except (PeerError, RequestError):
            self.prefill.end(served)
            return
        self.num_offers += 1
        self._live.append(HandOver(prompt, served, send))

    def _go_on(self, each: HandOver) -> None:
        if each.prefilled is not None and self._draw.random() < 0.6:
            self._compute(each)
        elif each.decoded is not None:
            self._decode(each, each.decoded)
        elif each.receive is None:
            self._receive(each)
        elif each.receive.done and each.request is not None:
            succeeded = each.receive.succeeded
            each.decoded, request = self.decode.begin(each.prompt, 2, each.request), each.request
            each.request = None
            self.num_came += succeeded
            if succeeded and each.epoch == self._epoch:
                assert each.decoded.num_hit == each.send.num_blocks * BLOCK, (request, each.decoded)
                self.num_whole += each.receive.num_blocks > 0

    def _compute(self, each: HandOver) -> None:
        served = each.prefilled
        assert served is not None
        if self._step(self.prefill, served):
            each.prefilled = None

    def _step(self, engine: Float64Engine, served: Served) -> bool:
        """One step of it; whether that was its last."""
        try:
            is_over = engine.step(served)
        except OutOfBlocksError:
            is_over = True  # it is given up
            self.num_short += 1
        if is_over:
            if served.logits:
                engine.check(served)
            engine.end(served)
        return is_over

    def _receive(self, each: HandOver) -> None:
        each.request, each.epoch = self.decode.request_of(each.prompt), self._epoch
        try:
            each.receive = self.decode.cache.peers.receive(each.request, each.send.offer)
        except (PeerError, OutOfBlocksError):
            each.request = None  # it may try again
            if self._draw.random() < 0.2:
                self.prefill.cache.peers.cancel_send(each.send)

    def _decode(self, each: HandOver, served: Served) -> None:
        if self._step(self.decode, served):
            each.decoded = None

    def _receives(self) -> Iterator[tuple[SimulatedPeers, SimReceive]]:
        for end in self._network:
            yield from [(end, receive) for receive in end.receives]

    def _link(self) -> None:
        """Something is read, confirmed, given up, or answered."""
        going, draw = list(self._receives()), self._draw.random()
        if going and draw < 0.75:
            end, receive = self._draw.choice(going)
            end.read(receive, self._draw.randint(1, 3))
            if self._draw.random() < 0.7:
                end.confirm(receive)
            if receive in end.receives and (receive.is_cancelled or self._draw.random() < 0.02):
                end.fail(receive, "cancelled: it is not wanted" if receive.is_cancelled else "gone: a cable")
            elif receive in end.receives and receive.send is None and not receive.detail.wants_nothing:
                end.fail(receive, "gone: it is over")
        for end in self._network:
            for send in list(end.sends.values()):
                if (send.is_over or send.why) and self._draw.random() < 0.5:
                    end.end_send(send, send.why)

    def _trouble(self) -> None:
        draw, each = self._draw.random(), self._draw.choice(self._live) if self._live else None
        if draw < 0.3 and each is not None:
            self.prefill.cache.peers.cancel_send(each.send)
        elif draw < 0.6 and each is not None and each.request is not None:
            self.decode.cache.peers.cancel_receive(each.request)
            each.request = None
        elif draw < 0.8:
            engine = self._draw.choice((self.prefill, self.decode))
            engine.cache.reset()
            self._epoch += engine is self.decode

    def _drain(self) -> None:
        for _ in range(10_000):
            for each in self._live:
                self._go_on(each)
            self._live = [each for each in self._live if not each.is_over]
            for each in self._live:
                if each.prefilled is None and each.decoded is None and each.request is None:  # its reader has left
                    self.prefill.cache.peers.cancel_send(each.send)
            self._link()
            if not self._live and not list(self._receives()):
                break
        assert not self._live, "something does not come to its end"
        self.check()
        for engine in (self.prefill, self.decode):
            road = engine.cache.peers.road
            assert not [*road.sends.pins, *road.sends.checkpoints, *road.receives.pins, *road.receives.checkpoints]
            engine.cache.close()


def total(walks: list[LinkWalk], name: str) -> int:
    """Over all of them."""
    return int(np.sum([getattr(walk, name) for walk in walks]))
