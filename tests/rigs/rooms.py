"""Who may import whom: the tables that `tests/test_architecture.py` holds the code to."""

from __future__ import annotations

# Of transfer_manager, the engine side uses the parent's half only.
PARENT_SIDE = {
    "client",
    "config",
    "settings",
    "sizes",
    "task",
    "device.presence",
    "kv.groups",
    "kv.memory",
    "kv.parts",
    "kv.layout",
    "rank.client",
    "rank.inline_client",
    "rank.layer_progress",
    "rank.transfer_client",
    "rank.worker_signals",
    "storage.config",
    "storage.client",
    "storage.file_place",
    "storage.keys",
    "storage.weights",
    "peer.client",
    "peer.config",
    "peer.messages",
    "peer.offer",
    "peer.peer_signal",
    "peer.signature",
}
# A process that publishes events is one of ours: its room has both halves.
OWN_PROCESSES = {"events": {f"process.{half}" for half in (
    "begin", "callbacks", "child", "client", "lane_ends", "main", "owner", "setup", "wire", "words"
)}}  # fmt: skip
# Rooms within a package: which of the others each may import. A file that lies in no room is one by itself.
ROOMS = {
    "fastdeploy_cache": {
        "errors": set(),
        "books": {"errors", "_native"},
        "policies": {"books", "errors"},
        "request": {"books", "errors"},
        "config": {"policies", "errors"},
        "stats": {"policies", "books"},
        "movement": {"config", "policies", "books"},
        "storage": {"movement", "stats", "config", "request", "policies", "books", "errors"},
        "requests": {"storage", "movement", "config", "request", "policies", "books", "errors"},
        "peers": {"requests", "storage", "movement", "config", "request", "books", "errors"},
        "callers": {"requests", "movement", "stats", "config", "request", "books", "errors"},
        "ranks": {"peers", "movement", "config", "books", "errors"},
        "life_cycle": {"peers", "requests", "storage", "movement", "config", "books", "errors"},
        "events": {"config", "books", "errors"},
        "insight": {
            *("events", "callers", "peers", "requests", "storage", "movement", "stats", "config", "request"),
            *("policies", "books", "errors"),
        },
        "manager": {
            *("insight", "life_cycle", "ranks", "callers", "peers", "requests", "storage", "movement", "stats"),
            *("config", "request", "books", "errors"),
        },
        "what_if": {"manager", "insight", "config", "request", "policies", "books", "errors"},
        "adapters": {
            *("manager", "life_cycle", "callers", "peers", "requests", "config", "request", "policies", "books"),
            *("errors",),
        },
    },
    "transfer_manager": {
        **{room: set[str]() for room in ("task", "sizes", "crew")},
        "settings": {"sizes"},
        "config": {"settings"},
        "client": {"task"},
        "process": {"task", "config", "client"},
        "kv": {"settings"},
        "device": {"task", "kv", "crew"},
        "rank": {"task", "config", "client", "process", "kv", "device"},
        "storage": {"task", "config", "settings", "client", "process", "kv", "crew"},
        "peer": {"task", "config", "settings", "client", "process", "kv"},
        "__main__": {"process"},
    },
}
