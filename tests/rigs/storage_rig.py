"""A cache model with a simulated store below it."""

from __future__ import annotations

from fastdeploy_cache import StorageConfig
from fastdeploy_cache.request import Request
from tests.rigs.cache_model import CacheModel, LiveRequest
from tests.rigs.simulated_storage import SimulatedStorage

A = list(range(100, 141))  # ten full blocks of four and one token
STORE = StorageConfig(kind="tests.rigs.memory_storage:MemoryStorage", weights_id="w1")


class Rig:
    """A model with a store below it."""

    def __init__(
        self, objects: dict[bytes, object] | None = None, num_cpu: int = 32, num_gpu: int = 24, **settings: object
    ) -> None:
        settings = {"min_prefetch_tokens": 4, "load_policy": "always", "prefetch_policy": "wait_complete"} | settings
        self.model = CacheModel(4, num_gpu, num_cpu, **settings)  # type: ignore[arg-type]
        self.store = SimulatedStorage(self.model.client, objects)
        self.model.cache.storage.attach(STORE, client=self.store)
        self.store.land_all()  # the probe

    def prefetch(self, tokens: list[int]) -> Request:
        """Queue the request that the next `match` of these tokens will be."""
        request = Request(request_id=f"r{self.model.num_requests + 1}", prompt_token_ids=tokens)
        self.model.cache.prefetch(request)
        return request

    def match(self, tokens: list[int]) -> LiveRequest:
        return self.model.must_match(tokens)

    def know(self, tokens: list[int]) -> None:
        """Another process has committed these."""
        for num_blocks in range(len(tokens) // 4 + 1):
            self.model.committed.add((self.model.space_of(""), tuple(tokens[: 4 * num_blocks]), ()))

    def land_all(self) -> None:
        while self.store.tasks or self.model.client.tasks:
            self.store.land_all()
            self.model.client.land_all()

    def finish(self) -> None:
        self.land_all()
        self.model.finish()


def stored(tokens: list[int], **settings: object) -> dict[bytes, object]:
    """What an engine that served these leaves in a store."""
    rig = Rig(**settings)
    rig.model.serve_and_copy(tokens)
    rig.land_all()
    objects = rig.store.objects
    rig.finish()
    return objects
