"""FastDeploy's prefill and decode instances: what takes the place of their cache messager's messages."""

from __future__ import annotations

import operator

from fastdeploy_cache.adapters.fastdeploy.current_cache import CurrentCache
from fastdeploy_cache.adapters.fastdeploy.held_tasks import HeldTasks
from fastdeploy_cache.adapters.fastdeploy.launching import Launcher
from fastdeploy_cache.adapters.fastdeploy.task import NotEnoughBlocksError, Task, new_request
from fastdeploy_cache.errors import ConfigError, OutOfBlocksError, RequestError
from fastdeploy_cache.peers.transfers import Receive, Send


class PeerCalls:
    """The part of the adapter about other instances; nothing here waits.

    Prefill: `request_match_blocks`, `offer_blocks`, `begin_step` before each step, `update_cache_blocks` after it,
    `release_block_ids` after the last. Decode: `receive_blocks` when the task is queued, `request_match_blocks` once
    that is done.
    """

    def __init__(self, current: CurrentCache, tasks: HeldTasks, launcher: Launcher) -> None:
        self._current, self._tasks, self._launcher = current, tasks, launcher

    # -- prefill

    def offer_blocks(self, task: Task) -> Send:
        """Offer the full blocks of a held task's tokens: `Send.offer`, bytes for the decode instance's
        `receive_blocks`. Before its first step, and before it has output: the other side's tokens have to be the same.

        All of it has to be computed before `release_block_ids`, or the send fails. Released or not, the blocks stay
        until the send has ended.

        Raises:
            UnknownTaskError: it holds nothing.
            PeerRefusedError: this instance only decodes. PeerError: not now. RequestError: it is offered already, or
            has no full block. ConfigError: no peers.
        """
        self._check_peers("offer_blocks")
        return self._current.cache.peers.offer(self._tasks.get(task).request)

    def begin_step(self, task: Task, num_computed_tokens: int, step: int) -> None:
        """Before a step that computes the task's tokens up to there, and whose layers the workers mark under the number
        `step` (`manager.cache.step_progress(rank).mark`): they are sent as they are marked.

        The full blocks, from `task.block_tables`, are the cache's from now on, as `task.num_cached_blocks` says, and
        findable only after `update_cache_blocks`. Without this call blocks are sent after each step.

        Raises:
            UnknownTaskError: it holds nothing. BlockOwnerError: its table has a block that is not its own.
            RequestError: more tokens than it has, or than its table holds.
        """
        held, num_tokens = self._tasks.get(task), operator.index(num_computed_tokens)
        held.follow_outputs()
        if not 0 <= num_tokens <= held.request.num_tokens:
            what = f"step {step} of request {task.request_id!r} computes {num_tokens} tokens"
            raise RequestError(f"{what}; it has {held.request.num_tokens}")
        num_blocks = self._tasks.hand_over(held, num_tokens)
        self._current.cache.peers.begin_step(held.request, num_blocks * self._current.block_size, step)

    def cancel_send(self, send: Send) -> None:
        """Nobody is to read it any more."""
        self._current.cache.peers.cancel_send(send)

    # -- decode

    def receive_blocks(self, task: Task, offer: bytes) -> Receive:
        """Bring what a prefill instance offers of the task's tokens to the GPU; returns at once.

        Once it is `done`, `request_match_blocks` finds what came, and what is not full, one token at least, is computed
        here. Without success the whole is. What is cached here is not sent.

        Raises:
            PeerRefusedError: an offer that is none, of another prompt, or of an instance that does not fit; or this
            instance only computes prompts. PeerError: not now. NotEnoughBlocksError: no room now; nothing was changed.
            RequestError: it is held, or being received, already. ConfigError: no peers.
        """
        self._check_peers("receive_blocks")
        try:
            return self._current.cache.peers.receive(new_request(task), offer)
        except OutOfBlocksError as error:
            raise NotEnoughBlocksError(error.missing, error.coming) from error

    def cancel_receive(self, task: Task) -> None:
        """The task has gone, and no `request_match_blocks` follows: what has come may be evicted."""
        self._current.cache.peers.cancel_receive(new_request(task))

    def _check_peers(self, verb: str) -> None:
        if self._current.cache.config.peer is None:
            what = f"{verb}, with splitwise_role {self._current.splitwise_role!r}"
            if not self._launcher.is_launched:
                raise ConfigError(f"{what}, before the processes are started; call launch_cache_manager first")
            raise ConfigError(f"{what}: no blocks go between instances; use 'prefill' and 'decode'")
