"""What an instance hands out: whole or refused, and refused where the blocks would be none for us."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_cache.errors import PeerRefusedError
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.peer.offer import InstanceInfo, Offer, check_fits, prompt_digest
from tests.rigs.offers import INFO, LAYOUT, OFFER


def changed(**fields: object) -> InstanceInfo:
    return msgspec.structs.replace(INFO, **fields)


def test_round_trip() -> None:
    """What comes out is what went in, layout and all."""
    layout = KVLayout(
        num_layers=3, num_kv_heads=4, head_dim=8, dtype="int4", scale_dtype="float32", heads_first=True,
        num_extra_layers=1, extra_layer_block_ratio=1.5,
    )  # fmt: skip
    offer = msgspec.structs.replace(OFFER, source=changed(layout=layout, public_key=b"k" * 40))
    assert Offer.from_bytes(offer.to_bytes()) == offer


@given(st.integers(0), st.integers(1, 255))
def test_damage_is_refused_or_harmless(where: int, change: int) -> None:
    """Of a byte that has changed nothing comes but a refusal, or an offer whose every field is in its range."""
    data = bytearray(OFFER.to_bytes())
    data[where % len(data)] ^= change
    try:
        offer = Offer.from_bytes(bytes(data))
    except PeerRefusedError:
        return
    assert Offer.from_bytes(offer.to_bytes()) == offer


@given(st.integers(0))
def test_a_piece_of_an_offer_is_refused(end: int) -> None:
    """Cut anywhere."""
    data = OFFER.to_bytes()
    with pytest.raises(PeerRefusedError, match="are no offer"):
        Offer.from_bytes(data[: end % len(data)])


@pytest.mark.parametrize(
    "fields",
    [
        {"number": -1},
        {"num_blocks": 2**31},
        {"prompt": bytes(31)},
        {"source": changed(instance_id=bytes(15))},
        {"source": changed(block_size=0)},
        {"source": changed(tp_size=0, addresses=())},
    ],
)
def test_impossible_fields_are_refused(fields: dict[str, object]) -> None:
    """Sizes and numbers out of range."""
    with pytest.raises(PeerRefusedError, match="are no offer"):
        Offer.from_bytes(msgspec.structs.replace(OFFER, **fields).to_bytes())


def test_a_name_that_is_no_text_is_refused() -> None:
    """Bytes that are no UTF-8."""
    with pytest.raises(PeerRefusedError, match="are no offer"):
        Offer.from_bytes(OFFER.to_bytes().replace(b"prefill-0", b"prefill-\xff"))


def test_an_impossible_layout_is_refused() -> None:
    """Though each of its fields is of the right type."""
    data = OFFER.to_bytes().replace(b"\xaanum_layers\x03", b"\xaanum_layers\x00")
    with pytest.raises(PeerRefusedError, match="num_layers is 0"):
        Offer.from_bytes(data)


def test_another_version_is_refused_with_both() -> None:
    """And says what to do."""
    with pytest.raises(PeerRefusedError, match=r"version 2, this is 1.*update"):
        Offer.from_bytes(msgspec.structs.replace(OFFER, version=2).to_bytes())


def test_addresses_are_one_for_each_rank() -> None:
    """Through storage there are none."""
    with pytest.raises(PeerRefusedError, match=r"prefill-0.*1 addresses for 2 ranks"):
        Offer.from_bytes(msgspec.structs.replace(OFFER, source=changed(addresses=("ipc:///run/a",))).to_bytes())
    offer = msgspec.structs.replace(OFFER, source=changed(link="storage", addresses=()))
    assert Offer.from_bytes(offer.to_bytes()) == offer


def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    """Eight ranks cannot hold twelve heads: no instance is like that, and who reads which head could not be said."""
    info = changed(tp_size=8, addresses=tuple(f"ipc:///run/{rank}" for rank in range(8)))
    with pytest.raises(PeerRefusedError):
        check_fits(INFO, Offer.from_bytes(msgspec.structs.replace(OFFER, source=info).to_bytes()).source)


def test_equals_fit_whatever_is_each_sides_own() -> None:
    """Number of ranks, names, order of arrays, speculative layers' room."""
    extra = dataclasses.replace(LAYOUT, num_extra_layers=1)
    own = dataclasses.replace(extra, extra_layer_block_ratio=2.0)
    check_fits(INFO, INFO)
    check_fits(INFO, changed(name="other", instance_id=bytes(16), tp_size=4, addresses=(), public_key=b"k"))
    check_fits(INFO, changed(layout=dataclasses.replace(LAYOUT, device_order="block_first")))
    check_fits(changed(layout=extra), changed(layout=own))


@pytest.mark.parametrize(
    ("fields", "mine", "theirs"),
    [
        ({"weights_id": "w2"}, "'w1'", "'w2'"),
        ({"block_size": 32}, "16", "32"),
        ({"link": "nixl"}, "'shm'", "'nixl'"),
        ({"tp_size": 3}, "2", "3"),
        ({"layout": dataclasses.replace(LAYOUT, num_layers=4)}, "num_layers=3", "num_layers=4"),
        ({"layout": dataclasses.replace(LAYOUT, num_kv_heads=8)}, "num_kv_heads=12", "num_kv_heads=8"),
        ({"layout": dataclasses.replace(LAYOUT, head_dim=16)}, "head_dim=8", "head_dim=16"),
        ({"layout": dataclasses.replace(LAYOUT, dtype="bfloat16")}, "'float16'", "'bfloat16'"),
        ({"layout": dataclasses.replace(LAYOUT, value_head_dim=16)}, "value_head_dim=None", "value_head_dim=16"),
        ({"layout": dataclasses.replace(LAYOUT, scale_dtype="float32")}, "scale_dtype=None", "scale_dtype='float32'"),
        ({"layout": dataclasses.replace(LAYOUT, heads_first=True)}, "heads_first=False", "heads_first=True"),
        ({"layout": dataclasses.replace(LAYOUT, num_extra_layers=1)}, "num_extra_layers=0", "num_extra_layers=1"),
    ],
)
def test_what_differs_is_refused_with_both_values(fields: dict[str, object], mine: str, theirs: str) -> None:
    """Whichever side asks."""
    other = changed(**fields, name="other")
    for here, there, name in ((INFO, other, "other"), (other, INFO, "prefill-0")):
        with pytest.raises(PeerRefusedError) as caught:
            check_fits(here, there)
        message = str(caught.value)
        assert mine in message and theirs in message and f"instance {name!r}" in message


def test_through_storage_ranks_are_equal() -> None:
    """Each rank finds what the same rank has written."""
    storage = changed(link="storage", addresses=())
    check_fits(storage, storage)
    with pytest.raises(PeerRefusedError, match=r"4 ranks, this one 2.*equal through storage"):
        check_fits(storage, changed(link="storage", addresses=(), tp_size=4))


Prompt = tuple[str, bytes, dict[int, bytes]]
PROMPTS = st.tuples(
    st.text("ab", max_size=4),
    st.binary(max_size=8),
    st.dictionaries(st.integers(0, 3), st.binary(max_size=3), max_size=3),
)


@settings(max_examples=50)
@given(PROMPTS, PROMPTS)
def test_a_digest_names_one_prompt(one: Prompt, other: Prompt) -> None:
    """Equal for the same namespace, tokens and extra keys, another for any others."""
    assert len(prompt_digest(*one)) == 32
    assert (prompt_digest(*one) == prompt_digest(*other)) == (one == other)


def test_no_part_of_a_prompt_passes_for_another() -> None:
    """What moves over a border between parts makes another prompt; the order in which extra keys were told does not."""
    token = (7).to_bytes(4, "little")
    prompts = [
        ("a", token * 2, None),
        ("a" + token.decode("latin1"), token, None),
        ("", b"a" + token * 2, None),
        ("a", token, {0: token}),
        ("a", token * 2, {0: b""}),
        ("a", token * 2, {1: b""}),
        ("a", token * 2, {0: b"x", 1: b"y"}),
        ("a", token * 2, {0: b"y", 1: b"x"}),
    ]
    assert len({prompt_digest(*prompt) for prompt in prompts}) == len(prompts)
    assert prompt_digest("a", token, {0: b"x", 1: b"y"}) == prompt_digest("a", token, {1: b"y", 0: b"x"})
    assert prompt_digest("a", token, None) == prompt_digest("a", token, {})
