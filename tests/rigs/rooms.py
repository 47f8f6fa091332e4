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
    "kv.memory",
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
# Rooms within a package: which of the others each may import. A file that lies in no room is one by itself.
ROOMS = {
    "fastdeploy_cache": {
        "errors": set(),
        "causes": set(),
        "explanation": {"causes"},
        "match": {"explanation"},
        "config_sources": {"errors"},
        "config": {"config_sources", "errors", "policies"},
        "tokens": {"errors", "_native"},
        "request": {"books", "errors", "tokens"},
        "stats": {"books", "policies"},
        "books": {"_native", "errors", "policies"},
        "policies": {"books", "errors"},  # beside the books: state in, choice out
        "movement": {"books", "causes", "config", "errors", "policies"},
        "storage": {"movement", "books", "config", "errors", "policies", "request", "stats"},
        "requests": {
            *("storage", "movement", "books", "causes", "config", "errors", "explanation", "match", "policies"),
            *("request", "tokens"),
        },
        "peers": {"requests", "storage", "movement", "books", "config", "errors", "request"},
        "callers": {"requests", "movement", "books", "config", "errors", "policies", "request", "stats"},
        "ranks": {"peers", "movement", "books", "config", "errors"},
        "life_cycle": {"peers", "requests", "storage", "movement", "books", "config", "errors"},
        "recorder": {"movement", "storage", "books", "config", "errors", "stats"},
        "manager": {
            *("recorder", "callers", "life_cycle", "movement", "peers", "ranks", "requests", "storage", "books"),
            *("policies", "config", "errors", "explanation", "match", "request", "stats", "tokens"),
        },
        "adapters": {
            *("manager", "callers", "life_cycle", "peers", "books", "policies", "config", "config_sources", "errors"),
            *("match", "request", "tokens"),
        },
    },
    "transfer_manager": {
        **{room: set[str]() for room in ("task", "settings", "sizes", "crew")},
        "config": {"settings"},
        "client": {"task"},
        "process": {"task", "config", "client"},
        "kv": {"settings"},
        "device": {"task", "kv", "crew"},
        "rank": {"task", "config", "client", "process", "kv", "device"},
        "storage": {"task", "config", "settings", "client", "process", "kv", "crew"},
        "peer": {"task", "config", "settings", "client", "process", "kv"},
        "__main__": {"rank"},
    },
}
