"""KV events: what is cached, told to routers and others. `Mirror` follows a publisher."""

from fastdeploy_cache.events.index import PrefixFound
from fastdeploy_cache.events.mirror import Mirror

__all__ = ["Mirror", "PrefixFound"]
