"""Which names a port on loopback may be asked under."""

from __future__ import annotations

import pytest

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.metrics.allowed_hosts import AllowedHosts


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "127.8.9.1", "[::1]:80", "given", "a:81", "b:9"],
)
def test_names_that_are_ours_pass(host: str) -> None:
    """Those of loopback, the host that was asked for, and those that were allowed, with their ports if given."""
    hosts = AllowedHosts("Given", "127.0.1.1", ["a:81", "B"])
    assert hosts.refusal("GET", [host], []) is None
    assert hosts.refusal("POST", [host], [f"http://{host}"]) is None


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "a", "a:82", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1"),
        *("", "[::2]", "127.0.0.1@evil", "localhost:99999", "localhost:", "local host", "2130706433", "evil,localhost"),
    ],
)
def test_other_names_are_refused(host: str) -> None:
    """Whatever the method, in one line that says what to do; as an origin where something is changed."""
    hosts = AllowedHosts("127.0.0.1", "127.0.0.1", ["a:81"])
    for method in ("GET", "POST"):
        said = hosts.refusal(method, [host], [])
        assert said is not None and "--allow-host" in said and "\n" not in said
        assert hosts.refusal(method, ["localhost", host], []) is not None
    assert hosts.refusal("POST", ["localhost"], [f"https://{host}"]) is not None
    assert hosts.refusal("GET", ["localhost"], [f"https://{host}"]) is None


def test_origins_that_are_no_site_are_refused() -> None:
    """A sandboxed page says `null`; what has no origin is no browser."""
    hosts = AllowedHosts("127.0.0.1", "127.0.0.1")
    for origin in ("null", "file://", "ftp://localhost", "http://", "x" * 10**5):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            said = hosts.refusal(method, ["localhost"], [origin])
            assert said is not None and len(said) < 300
    assert hosts.refusal("POST", ["localhost"], []) is None and hosts.refusal("GET", [], []) is None


def test_a_port_for_others_is_checked_only_where_names_are_given() -> None:
    """What is listened on off loopback has names that nobody here knows."""
    assert AllowedHosts("0.0.0.0", "0.0.0.0").refusal("GET", ["any"], ["http://other"]) is None
    assert AllowedHosts("0.0.0.0", "0.0.0.0", ["me"]).refusal("GET", ["any"], []) is not None
    assert AllowedHosts("0.0.0.0", "0.0.0.0", ["me"]).refusal("GET", ["me:80"], []) is None


def test_a_port_for_others_takes_what_its_own_pages_send() -> None:
    """There, too, a page of another site has an `Origin` that is not the `Host`; whoever has none is no browser."""
    hosts = AllowedHosts("0.0.0.0", "0.0.0.0")
    for host, origin in (
        *(
            ("box:8000", "http://box:8000"),
            ("BOX", "http://box"),
            ("box", "https://box:8443"),
            ("[::2]:1", "http://[::2]:1"),
        ),
        *(("box:443", "https://box"), ("127.0.0.1:8000", "http://127.0.0.1:8000")),
    ):
        assert hosts.refusal("POST", [host], [origin]) is None
    for host, origin in (
        *(("box:8000", "http://evil"), ("box:8000", "http://box"), ("box:8000", "http://box:3000"), ("box:80", "null")),
        *(("box:8000", "http://localhost:8000"), ("box:8000", "http://127.0.0.1:8000"), ("a,b", "http://a,b")),
    ):
        said = hosts.refusal("POST", [host], [origin])
        assert said is not None and "--allow-host" in said
    assert hosts.refusal("POST", [], ["http://box"]) is not None
    assert hosts.refusal("POST", ["box"], []) is None and hosts.refusal("POST", [], []) is None


@pytest.mark.parametrize("name", ["", "a b", "http://a", "a:", "a:0", "a:65536", "a/b", "*"])
def test_what_is_no_name_is_refused(name: str) -> None:
    """With the option and the value seen."""
    with pytest.raises(ConfigError, match=r"^--allow-host is "):
        AllowedHosts("127.0.0.1", "127.0.0.1", [name])


def test_ports_that_browsers_leave_out_are_those_of_the_scheme() -> None:
    """`cache.example:443` is what a page of https://cache.example is of, and a Host without a port."""
    hosts = AllowedHosts("127.0.0.1", "127.0.0.1", ["cache.example:443"])
    assert hosts.refusal("POST", ["cache.example"], ["https://cache.example"]) is None
    assert hosts.refusal("POST", ["cache.example:443"], ["http://cache.example"]) is not None
    assert hosts.refusal("GET", ["cache.example:8443"], []) is not None


def test_loopback_of_ipv4_is_loopback_in_ipv6_too() -> None:
    """A listener on `::ffff:127.0.0.1` is one for this machine alone."""
    assert AllowedHosts("::ffff:127.0.0.1", "::ffff:127.0.0.1").refusal("GET", ["evil.example"], []) is not None
