"""Links between instances: reading blocks out of the registered memory of another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastdeploy_cache.transfer_manager.peer.link import Link


KINDS = ("shm", "nixl", "mooncake")


def open_link(kind: str, options: Mapping[str, Any]) -> Link:
    """A new link. Options, all of them optional:

    - `shm` (both processes on one host, of one user): none.
    - `nixl`: `backend` ("UCX").
    - `mooncake`: `hostname` ("127.0.0.1"; where peers reach this process), `protocol` ("tcp"), `device_name` ("").

    Raises:
        LinkError: "refused": no such kind, or its library is missing; "failed": the library does not start.
    """
    if kind == "shm":
        from fastdeploy_cache.transfer_manager.peer.link_shm import ShmLink

        return ShmLink()
    from fastdeploy_cache.transfer_manager.peer.link_address import AddressLink

    if kind == "nixl":
        from fastdeploy_cache.transfer_manager.peer.link_nixl import NixlEngine

        return AddressLink(kind, NixlEngine(options))
    if kind == "mooncake":
        from fastdeploy_cache.transfer_manager.peer.link_mooncake import MooncakeEngine

        return AddressLink(kind, MooncakeEngine(options))
    from fastdeploy_cache.transfer_manager.peer.link import LinkError

    raise LinkError(f"link kind is {kind!r}; known: {', '.join(KINDS)}", "refused")
