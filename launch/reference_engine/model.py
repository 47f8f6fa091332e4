"""SmolLM2 on Paddle CPU in float32, with attention over paged KV blocks. Other layers between: see `hybrid_spec`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdeploy_cache.launch.reference_engine.delta_rule import DeltaInputs, advance
from fastdeploy_cache.launch.reference_engine.hybrid_spec import WINDOW_TOKENS, gates_of, kinds_of
from fastdeploy_cache.launch.reference_engine.paddle_runtime import import_paddle, share_array
from fastdeploy_cache.launch.reference_engine.paged_kv import KVShard, PagedKV, SequenceChunk
from fastdeploy_cache.launch.reference_engine.weight_cache import Float32Array
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles

# Causal attention in query tiles skips the upper triangle and keeps the scores in the CPU's cache.
_TILE_TOKENS = 128


@dataclass(frozen=True)
class _ChunkPlan:
    """What all layers share for one chunk: where its tokens are in the batch and in the blocks."""

    begin: int  # of its tokens in the batch
    num_tokens: int
    start: int  # position of its first token in the sequence
    read_rows: Any
    masks: list[Any]  # one per query tile, [tile, keys so far]; None where a single query sees all
    first: int = 0  # of the keys that are read


class Llama:
    """A Llama model whose tensor-parallel ranks all run in this process; one thread may use it.

    Args:
        files: from ``load_model_files``.
        kv_shards: one per rank; see ``KVShard``.
        gpu: the GPU to compute on, where the shards are; None: the CPU.
        is_hybrid: layers are those of `hybrid_spec`; on a CPU alone.

    Raises:
        ValueError: the shards do not fit the model.
        ModelLoadError: Paddle is missing, installed twice, or cannot share memory.
    """

    def __init__(
        self, files: ModelFiles, kv_shards: Sequence[KVShard], gpu: int | None = None, *, is_hybrid: bool = False
    ) -> None:
        self._paddle = import_paddle()
        if gpu is not None:
            self._paddle.set_device(f"gpu:{gpu}")
        self.spec = files.spec
        self.kv = PagedKV(kv_shards, files.spec)
        weights = {name: share_array(tensor) for name, tensor in files.tensors.items()}
        self._weights = weights if gpu is None else {name: weight.cuda(gpu) for name, weight in weights.items()}
        frequency = files.spec.rope_theta ** (-np.arange(0, files.spec.head_dim, 2) / files.spec.head_dim)
        angle = np.arange(files.spec.context_length)[:, None] * frequency
        rope = np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)
        self._rope = self._paddle.to_tensor(rope)  # [context, head_dim / 2, 2]: cos + i sin per pair
        self._kinds = kinds_of(files.spec) if is_hybrid else ("full",) * files.spec.num_layers
        self._gates = gates_of(files.spec) if is_hybrid else {}

    def forward(
        self, chunks: Sequence[SequenceChunk], before_layer: Callable[[int], None] = lambda _: None
    ) -> Float32Array:
        """Compute the chunks' tokens, write their KV into the blocks and score what follows each chunk.

        Args:
            chunks: of different sequences; their tokens share each read of the weights.
            before_layer: called with each layer's number before its KV is read; may wait until it is there.

        Returns:
            Logits of each chunk's last token, float32 [len(chunks), vocab_size].

        Raises:
            ValueError: no chunk, a token id or position out of range, or blocks that do not fit.
        """
        self._check(chunks)
        paddle = self._paddle
        with paddle.no_grad():
            plans = {"full": self._plan(chunks)}
            if self._gates:
                plans["window"] = self._plan_windows(chunks)
            token_ids = np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int64)
            positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
            rope = paddle.as_complex(paddle.gather(self._rope, paddle.to_tensor(positions))).unsqueeze(1)
            write_rows = {kind: self.kv.write_rows(chunks, of_window=kind == "window") for kind in plans}
            hidden = paddle.gather(self._weights["embedding"], paddle.to_tensor(token_ids))
            for layer in range(self.spec.num_layers):
                before_layer(layer)
                normed = self._norm(hidden, f"{layer}.attn_norm")
                kind = self._kinds[layer]
                if kind == "state":
                    attended = self._follow_states(layer, normed, chunks)
                else:
                    attended = self._attention(layer, normed, rope, write_rows[kind], plans[kind])
                hidden = hidden + self._project(attended, f"{layer}.attn_output")
                gate_up = self._project(self._norm(hidden, f"{layer}.ffn_norm"), f"{layer}.gate_up")
                gate, up = gate_up[:, : self.spec.ffn_size], gate_up[:, self.spec.ffn_size :]
                activated = paddle.nn.functional.silu(gate) * up
                hidden = hidden + self._project(activated, f"{layer}.ffn_down")
            last = paddle.to_tensor(np.array([plan.begin + plan.num_tokens - 1 for plan in plans["full"]]))
            final = self._norm(paddle.gather(hidden, last), "final_norm")
            logits: Float32Array = self._project(final, "embedding").numpy()
        return logits

    def _attention(self, layer: int, normed: Any, rope: Any, write_rows: Any, plans: list[_ChunkPlan]) -> Any:
        """Store this layer's new keys and values, then attend: [tokens, hidden] to [tokens, hidden]."""
        paddle, spec, per_rank = self._paddle, self.spec, self.kv.kv_heads_per_rank
        group = spec.num_heads // spec.num_kv_heads
        heads = self._project(normed, f"{layer}.qkv").reshape([len(normed), -1, spec.head_dim // 2, 2])
        num_rotated = spec.num_heads + spec.num_kv_heads
        rotated = paddle.as_real(paddle.as_complex(heads[:, :num_rotated]) * rope).flatten(2)
        query = rotated[:, : spec.num_heads] * (1.0 / math.sqrt(spec.head_dim))
        key, value = rotated[:, spec.num_heads :], heads[:, num_rotated:].flatten(2)
        of_ranks = []
        for rank in range(self.kv.num_ranks):
            kv_heads = slice(rank * per_rank, (rank + 1) * per_rank)
            self.kv.write(rank, layer, write_rows, key[:, kv_heads], value[:, kv_heads])
            mine = query[:, kv_heads.start * group : kv_heads.stop * group]
            of_chunks = []
            for plan in plans:
                keys, values = self.kv.read(rank, layer, plan.read_rows)
                part = mine[plan.begin : plan.begin + plan.num_tokens]
                of_chunks.append(self._attend(part, keys, values, plan))
            of_ranks.append(paddle.concat(of_chunks))
        return paddle.concat(of_ranks, axis=1).flatten(1)

    def _attend(self, query: Any, keys: Any, values: Any, plan: _ChunkPlan) -> Any:
        """One chunk on one rank: query [n, heads, d] over keys [kv_heads, end, d] gives [n, heads, d].

        The query heads of one kv head are laid behind each other, so that one product serves them all.
        """
        paddle = self._paddle
        kv_heads, _, head_dim = keys.shape
        grouped = query.reshape([plan.num_tokens, kv_heads, -1, head_dim]).transpose([1, 2, 0, 3])
        tiles = []
        for index, mask in enumerate(plan.masks):
            tile = grouped[:, :, index * _TILE_TOKENS : (index + 1) * _TILE_TOKENS]
            seen = plan.start - plan.first + index * _TILE_TOKENS + tile.shape[2]
            scores = paddle.matmul(tile.reshape([kv_heads, -1, head_dim]), keys[:, :seen], transpose_y=True)
            if mask is not None:
                scores = (scores.reshape([kv_heads, -1, *mask.shape]) + mask).flatten(1, 2)
            weights = paddle.nn.functional.softmax(scores, axis=-1)
            tiles.append(paddle.matmul(weights, values[:, :seen]).reshape(tile.shape))
        return paddle.concat(tiles, axis=2).transpose([2, 0, 1, 3]).flatten(1, 2)

    def _plan(self, chunks: Sequence[SequenceChunk]) -> list[_ChunkPlan]:
        plans, begin = [], 0
        for chunk in chunks:
            num_tokens = len(chunk.token_ids)
            edges = [*range(chunk.start, chunk.end, _TILE_TOKENS), chunk.end]
            masks = [self._mask(first, end) for first, end in itertools.pairwise(edges)]
            plans.append(_ChunkPlan(begin, num_tokens, chunk.start, self.kv.read_rows(chunk), masks))
            begin += num_tokens
        return plans

    def _plan_windows(self, chunks: Sequence[SequenceChunk]) -> list[_ChunkPlan]:
        """The same for layers that see a window."""
        plans, begin = [], 0
        for chunk in chunks:
            num_tokens, first = len(chunk.token_ids), max(0, chunk.start - WINDOW_TOKENS + 1)
            edges = [*range(chunk.start, chunk.end, _TILE_TOKENS), chunk.end]
            masks = [self._window_mask(first, *pair) for pair in itertools.pairwise(edges)]
            rows = self.kv.window_rows(chunk, first)
            plans.append(_ChunkPlan(begin, num_tokens, chunk.start, rows, masks, first))
            begin += num_tokens
        return plans

    def _window_mask(self, first_key: int, first: int, end: int) -> Any:
        """The same over the keys first_key..end-1, of which each query sees a window."""
        distance = np.arange(first, end)[:, None] - np.arange(first_key, end)[None, :]
        is_seen = (distance >= 0) & (distance < WINDOW_TOKENS)
        return self._paddle.to_tensor(np.where(is_seen, np.float32(0), np.float32(-np.inf)))

    def _follow_states(self, layer: int, normed: Any, chunks: Sequence[SequenceChunk]) -> Any:
        """Take each chunk's state on, and read it behind each token: [tokens, hidden] to [tokens, hidden]."""
        spec = self.spec
        heads = self._project(normed, f"{layer}.qkv").numpy().reshape(len(normed), -1, spec.head_dim)
        query, key, value = np.split(heads, [spec.num_heads, spec.num_heads + spec.num_kv_heads], axis=1)
        query, key = (each / np.linalg.norm(each, axis=-1, keepdims=True).clip(1e-6) for each in (query, key))
        query = query.reshape(len(normed), spec.num_kv_heads, -1, spec.head_dim)
        keep, strength = 1 / (1 + np.exp(-np.einsum("gkh,nh->gnk", self._gates[layer], normed.numpy())))
        gates = np.stack([1 - keep / 8, strength])
        inputs, read, begin = DeltaInputs(query, key, value, gates), [], 0
        for chunk in chunks:
            assert chunk.slots is not None, "a chunk of another model"
            part = inputs.part(begin, begin + len(chunk.token_ids))
            found, state = advance(self.kv.read_state(layer, chunk.slots[0]), part, chunk.start)
            self.kv.write_state(layer, chunk.slots[1], state)
            read.append(found)
            begin += len(chunk.token_ids)
        return self._paddle.to_tensor(np.concatenate(read).reshape(len(normed), -1))

    def _mask(self, first: int, end: int) -> Any:
        """Added to the scores of the queries first..end-1 over the keys 0..end-1."""
        if end - first == 1:
            return None
        return self._paddle.to_tensor(np.triu(np.full((end - first, end), -np.inf, np.float32), k=first + 1))

    def _norm(self, hidden: Any, name: str) -> Any:
        # Not fused_rms_norm: Paddle 3.3.1's kernel dies with SIGILL on CPUs without AVX-512.
        mean_square = (hidden * hidden).mean(-1, keepdim=True)
        return hidden * self._paddle.rsqrt(mean_square + self.spec.rms_eps) * self._weights[name]

    def _project(self, inputs: Any, name: str) -> Any:
        return self._paddle.matmul(inputs, self._weights[name], transpose_y=True)

    def _check(self, chunks: Sequence[SequenceChunk]) -> None:
        if not chunks:
            raise ValueError("forward needs at least one chunk, got none")
        for chunk in chunks:
            self.kv.check(chunk)
            if chunk.end > self.spec.context_length:
                raise ValueError(f"{chunk.end} tokens exceed the context of {self.spec.context_length}")
            if chunk.token_ids.min() < 0 or chunk.token_ids.max() >= self.spec.vocab_size:
                raise ValueError(f"token ids must be in 0..{self.spec.vocab_size - 1}: {chunk.token_ids}")
