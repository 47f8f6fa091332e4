"""Offers of this instance, and whether one of another instance is for a request of this one."""

from __future__ import annotations

from collections.abc import Mapping

from fastdeploy_cache.books.path import usable_end
from fastdeploy_cache.errors import PeerRefusedError
from fastdeploy_cache.ipc.clock import Event
from fastdeploy_cache.peers.transfers import Send
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.transfer_manager.peer.offer import InstanceInfo, Offer, check_fits, prompt_digest
from fastdeploy_cache.transfer_manager.peer.signature import OfferSigner


def last_boundary(request: Request, block_size: int) -> int:
    """The last block of a prompt behind which the same prompt can be gone on with, where that takes a checkpoint."""
    return usable_end(request, (request.num_prompt_tokens - 1) // block_size, block_size)


class PeerOffers:
    """Numbers are never used twice: what comes late finds nothing. Under the lock, but for `open` and the
    checks."""

    def __init__(self, info: InstanceInfo, signer: OfferSigner) -> None:
        self.info = info
        self._signer = signer
        self._next_number = 1

    def next_number(self) -> int:
        """The number of the next offer or receive."""
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def new_send(self, active: ActiveRequest, num_blocks: int, done: Event) -> Send:
        """An offer of the first blocks of a request's tokens; `done` is set when it has ended."""
        request, number = active.request, self.next_number()
        prompt = prompt_digest(request.namespace, request.tokens, active.keys.extras)
        offer = Offer(source=self.info, number=number, num_blocks=num_blocks, prompt=prompt)
        return Send(request.request_id, number, num_blocks, done, self._signer.sign(offer))

    def open(self, data: bytes) -> Offer:
        """What another instance of the group offers. Raises `PeerRefusedError` for all that is not such an offer."""
        return self._signer.open(data)

    def rename_weights(self, weights_id: str) -> None:
        """Offers are of other weights from now on, and so have those of others to be."""
        self.info = self.info.with_weights(weights_id)

    def check_fits(self, offer: Offer) -> None:
        """Raise `PeerRefusedError` where the other instance's blocks are none for this one."""
        check_fits(self.info, offer.source)

    def check(self, request: Request, extras: Mapping[int, bytes] | None, offer: Offer) -> None:
        """Raise `PeerRefusedError` where an offer is not for this request, or not for this instance. Any thread."""
        self.check_fits(offer)
        self.check_prompt(request, extras, offer)

    def check_prompt(self, request: Request, extras: Mapping[int, bytes] | None, offer: Offer) -> None:
        """Raise `PeerRefusedError` where an offer is not for this request. Any thread."""
        size = self.info.block_size
        if offer.source.instance_id == self.info.instance_id:
            raise PeerRefusedError("the offer is this instance's own")
        if offer.num_blocks > request.num_tokens // size:
            num_blocks = request.num_tokens // size
            raise PeerRefusedError(
                f"the offer has {offer.num_blocks} blocks, request {request.request_id!r} {num_blocks}"
            )
        if offer.source.layout.groups:
            self._check_boundary(request, offer.num_blocks)
        if offer.prompt != prompt_digest(request.namespace, request.tokens, extras):
            raise PeerRefusedError(
                f"the offer of {offer.source.name!r} is of another prompt, namespace or images than request "
                f"{request.request_id!r}"
            )

    def _check_boundary(self, request: Request, boundary: int) -> None:
        """Raise `PeerRefusedError` where a request cannot go on at a checkpoint there."""
        name, last = f"request {request.request_id!r}", (request.num_tokens - 1) // self.info.block_size
        if not 0 < boundary <= last:
            raise PeerRefusedError(
                f"the offer ends behind block {boundary}; {name} can go on behind blocks 1 to {last}, as one token "
                "has to be left to compute"
            )
        if usable_end(request, boundary, self.info.block_size) != boundary:
            raise PeerRefusedError(f"the offer ends behind block {boundary}, within an image of {name}")
