"""Which names a port may be asked under: no page of a foreign site shall ask it by a browser.

A browser sends what a page asks for to any address that the page's name resolves to, loopback too (DNS rebinding), and
it sends a form of any page to any port. The `Host` and the `Origin` of a request tell.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from fastdeploy_cache.errors import ConfigError

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
_ORIGIN = re.compile(r"(https?)://(.+)", re.IGNORECASE)
_PORTS = {"http": (80,), "https": (443,)}  # that browsers leave out
_READING = frozenset({"GET", "HEAD", "OPTIONS"})  # methods that change nothing
_MOST_SHOWN = 100  # characters


class AllowedHosts:
    """The names of one listener: those of loopback, the host that was asked for, and what its user allows."""

    def __init__(self, host: str, address: str, names: Sequence[str] = ()) -> None:
        """`host`: what was asked for; `address`: what is listened on. `names`: NAME or NAME:PORT.

        Off loopback nobody here knows the names, but where some are given. What has an `Origin` has it as `Host` then.

        Raises:
            ConfigError: one of the names is none.
        """
        self._is_on = bool(names) or _is_loopback(address)
        self._known: list[tuple[str, int | None]] = [(_bare(host), None), ("localhost", None)]
        for name in names:
            parts = _parts(name)
            if parts is None:
                raise ConfigError(f"--allow-host is {name!r}; give a name or an address, such as cache.example:8443")
            self._known.append(parts)

    def refusal(self, method: str, hosts: Sequence[str], origins: Sequence[str]) -> str | None:
        """Why a request with these headers is refused, in a line; None: it is not. Any thread.

        One without `Origin` passes: only browsers send it, and they do so with all that changes something.
        """
        known = self._known if self._is_on else [parts for host in hosts if (parts := _parts(host)) is not None]
        for host in hosts:
            if self._is_on and not self._allows(host, (80, 443), known):
                return f"the Host {_shown(host)} is not one of this server; its user may allow it by --allow-host"
        for origin in origins if method not in _READING else ():
            found = _ORIGIN.fullmatch(origin)
            if found is None or not self._allows(found[2], _PORTS[found[1].lower()], known):
                return f"a page of {_shown(origin)} may not ask this server; its user may allow it by --allow-host"
        return None

    def _allows(self, host: str, left_out: Sequence[int], known: Sequence[tuple[str, int | None]]) -> bool:
        """`left_out`: the ports that it may stand for where it has none. One that is known without a port has any."""
        parts = _parts(host)
        if parts is None:
            return False
        name, port = parts
        ports = {None, port} if port is not None else {None, *left_out}
        is_here = self._is_on and _is_loopback(name)
        return is_here or any(name == other and allowed in ports for other, allowed in known)


def _parts(host: str) -> tuple[str, int | None] | None:
    """The name and the port of `NAME`, `NAME:PORT` or `[ADDRESS]:PORT`."""
    found = _HOST.fullmatch(host)
    if found is None:
        return None
    port = int(found[2]) if found[2] is not None else None
    return (_bare(found[1]), port) if port is None or 0 < port < 2**16 else None


def _bare(name: str) -> str:
    return name.lower().strip("[]").removesuffix(".")


def _is_loopback(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback
    except ValueError:
        return False


def _shown(text: str) -> str:
    return repr(text[:_MOST_SHOWN])
