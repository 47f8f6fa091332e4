"""The digest of an offer under the secret of its group: nobody outside can make an offer, or change one."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from fastdeploy_cache.errors import PeerRefusedError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.transfer_manager.peer.offer import Offer

_DIGEST_BYTES = hashlib.sha256().digest_size
_SECRET_BYTES = 32
_MAX_FILE_BYTES = 4096


class OfferSigner:
    """Signs the offers of this instance and opens those of others. Any thread.

    Without a secret the digest only tells of damage: whoever can hand over an offer is believed.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret

    def sign(self, offer: Offer) -> bytes:
        """The offer for any channel: its digest, then what it says. Neither tells the secret."""
        said = offer.to_bytes()
        return self._digest(said) + said

    def open(self, data: bytes) -> Offer:
        """What a signed offer says; nothing of it is looked at before its digest is known to be right.

        Raises:
            PeerRefusedError: it is none, was changed, or was made without the secret of this group.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise PeerRefusedError(f"an offer is bytes, not {data!r:.80}")
        digest, said = bytes(data[:_DIGEST_BYTES]), bytes(data[_DIGEST_BYTES:])
        if not hmac.compare_digest(digest, self._digest(said)):
            raise PeerRefusedError(
                f"{len(data)} bytes are no offer of this group: they were changed, or made without its secret; give "
                "all its instances the same peer.secret_file, and take offers from these alone"
            )
        return Offer.from_bytes(said)

    def _digest(self, said: bytes) -> bytes:
        return hmac.digest(self._secret, said, hashlib.sha256)


def make_secret(path: Path) -> None:
    """Write a new secret that only its owner may read.

    Raises:
        PeerRefusedError: something is there already, or the file cannot be written.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w") as opened:
            opened.write(f"{SYSTEM_CLOCK.random_bytes(_SECRET_BYTES).hex()}\n")
    except OSError as error:
        raise PeerRefusedError(f"no secret can be made at {path}: {error.strerror}; name a new file") from error


def load_secret(path: Path) -> bytes:
    """What `make_secret` has made, here or on another host.

    Raises:
        PeerRefusedError: it cannot be read, is too short to be one, or others may read or replace it.
    """
    try:
        with path.open("rb") as opened:
            found = os.fstat(opened.fileno())
            secret = opened.read(_MAX_FILE_BYTES).strip()
    except OSError as error:
        make = "make one with `fastdeploy-cache peer-secret`"
        raise PeerRefusedError(f"peer.secret_file {path}: {error.strerror}; {make}") from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077 or found.st_uid not in (0, os.geteuid()):
        text = f"peer.secret_file {path} is of user {found.st_uid} with mode {mode:o}, so others know the secret"
        raise PeerRefusedError(f"{text}; use a file of your own with mode 600, with a new secret")
    if len(secret) < _SECRET_BYTES:
        text = f"peer.secret_file {path} holds {len(secret)} bytes; give at least {_SECRET_BYTES} that nobody can guess"
        raise PeerRefusedError(f"{text}, as `fastdeploy-cache peer-secret` makes them")
    return secret
