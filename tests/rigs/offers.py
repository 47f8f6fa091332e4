"""An instance and its offer."""

from __future__ import annotations

from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.peer.offer import InstanceInfo, Offer

LAYOUT = KVLayout(num_layers=3, num_kv_heads=12, head_dim=8)
INFO = InstanceInfo(
    instance_id=bytes(range(16)),
    name="prefill-0",
    link="shm",
    weights_id="w1",
    block_size=16,
    tp_size=2,
    layout=LAYOUT,
    addresses=("ipc:///run/a", "ipc:///run/b"),
)
OFFER = Offer(source=INFO, number=3, num_blocks=9, prompt=bytes(32))
