"""Engines over a manager and its adapters, each by its own calls, for the stories of `chaos_rig`."""

from __future__ import annotations

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.errors import OutOfBlocksError
from tests.rigs.chaos_rig import SECONDS, ArraysLostError, Driver, Prompt


class NativeDriver(Driver):
    """An engine on the manager's own verbs. Every third request runs ahead of its loads."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        super().__init__(cache)
        self._num_asked = self.num_confirmed = 0

    def admit(self, prompt: Prompt) -> bool:
        request = prompt.engine = Request(
            request_id=prompt.name, prompt_token_ids=prompt.tokens, namespace=prompt.space
        )
        if self.cache.config.storage is not None:
            self.cache.prefetch(request).wait(self.patience)
        self._num_asked += 1
        may_run_ahead = self.kv.views and not self.cache.config.recompute_last_token
        try:
            if may_run_ahead and self._num_asked % 3 == 0:
                is_admitted = self._run_ahead(prompt)
            else:
                match = self.cache.match(request).wait(self.patience)
                new = self.cache.allocate(request, self.num_blocks(len(prompt.tokens)) - len(match.block_ids))
                prompt.table, prompt.num_computed, is_admitted = [*match.block_ids, *new], match.num_tokens, True
        except (OutOfBlocksError, ArraysLostError):
            is_admitted = False
        if not is_admitted:
            self.cache.release(request)
        return is_admitted

    def _run_ahead(self, prompt: Prompt) -> bool:
        """It takes blocks behind those that are coming, and reads these once every worker has seen the last layer."""
        request, match = prompt.engine, self.cache.match(prompt.engine)
        num_blocks = self.num_blocks(len(prompt.tokens))
        num_found = len(match.block_ids) + len(match.coming_block_ids)
        new = self.cache.allocate(request, num_blocks - num_found, ahead_of_loads=True)
        match = match.poll()
        prompt.table = [*match.block_ids, *match.coming_block_ids, *new]
        prompt.table += self.cache.allocate(
            request, self.num_blocks(len(prompt.tokens)) - len(prompt.table), ahead_of_loads=True
        )
        prompt.num_computed = match.num_tokens + match.num_coming_tokens
        arrived = True
        for rank, views in enumerate(self.kv.views):
            progress = self.cache.ranks.layer_progress(rank)
            assert progress is not None
            for layer in range(len(views)):
                arrived = arrived and progress.wait_layer(match.load_ids, layer, self.patience)
        if arrived:
            self.kv.check(prompt, prompt.num_computed)
        is_confirmed = self.cache.confirm(request, SECONDS, arrived=arrived)
        self.num_confirmed += is_confirmed and bool(match.load_ids)
        return is_confirmed

    def advance(self, prompt: Prompt, num_tokens: int) -> bool:
        end = prompt.num_computed + num_tokens
        try:
            prompt.table += self.cache.allocate(prompt.engine, max(0, self.num_blocks(end) - len(prompt.table)))
        except OutOfBlocksError:
            return False
        self.kv.write(prompt, end)
        prompt.num_computed = end
        prompt.engine.append_output(prompt.tokens[prompt.engine.num_tokens :])
        self.cache.commit(prompt.engine, end)
        return True

    def end(self, prompt: Prompt) -> None:
        self.cache.release(prompt.engine)
