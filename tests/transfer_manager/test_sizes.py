"""Sizes as people write them."""

from __future__ import annotations

import pytest

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.sizes import parse_size, with_sizes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        (" 4096 B ", 4096),
        ("10GB", 10**10),
        ("10G", 10**10),
        ("10gb", 10**10),
        ("64MiB", 2**26),
        ("64 MiB", 2**26),
        ("64Mi", 2**26),
        ("1.5GiB", 3 * 2**29),
        ("0.1GiB", 107374182),  # less than a byte is left out
        ("7kB", 7000),
        ("7KiB", 7168),
        ("2TB", 2 * 10**12),
        ("2TiB", 2**41),
        ("9007199254740993B", 9007199254740993),  # no float on the way
    ],
)
def test_what_a_size_means(text: str, num_bytes: int) -> None:
    """A plain number is bytes, `GB` and `G` are decimal, `GiB` is binary; case and spaces do not matter."""
    assert parse_size(text, "size_bytes") == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "-1GB", "1.5", "1.5B", "10 apples", "1e9", "10GB!", "1,5GB", "٣GB"])
def test_what_is_no_size(text: str) -> None:
    """The message names the setting, the value seen, and how sizes are written."""
    with pytest.raises(ConfigError) as caught:
        parse_size(text, "storage.capacity_bytes")
    message = str(caught.value)
    assert message.startswith(f"storage.capacity_bytes is {text!r}; give a number of bytes")
    assert "10GB" in message and "64MiB" in message


def test_a_size_of_many_digits_is_an_error_like_any_other() -> None:
    """Python would not convert it; the message shows its begin."""
    with pytest.raises(ConfigError, match=r"^a_bytes is '9{80}'; give a number of bytes"):
        parse_size("9" * 10_000, "a_bytes")


def test_only_texts_that_are_sizes_are_read() -> None:
    """Numbers stay as they are, and so do texts of other keys and what lies inside a table."""
    table = {"a_bytes": "1K", "b_bytes": 7, "folder": "1K", "options": {"a_bytes": "1K"}}
    read = table | {"a_bytes": 1000}
    assert with_sizes(table, "storage.") == read
    assert with_sizes({"c_bytes": "1KiB", "storage": table, "peer": None}) == {
        "c_bytes": 1024,
        "storage": read,
        "peer": None,
    }
    for settings, prefix in (({"storage": {"a_bytes": "much"}}, ""), ({"a_bytes": "much"}, "storage.")):
        with pytest.raises(ConfigError, match=r"storage\.a_bytes is 'much'"):
            with_sizes(settings, prefix)
