"""What is missed behind images, and in front of them."""

from __future__ import annotations

from fastdeploy_cache.books.causes import Cause
from tests.rigs.asker import Asker

A, B, C = ([base + i for i in range(400)] for base in (1000, 2000, 3000))


def test_text_in_front_of_an_image_is_the_same_text() -> None:
    """An image further on changes no place in front of it: not where another image came before, not where no image did,
    and not while the text is still being computed."""
    image = [(70, 4, b"one")]
    asker = Asker(num_gpu=24)
    asker.serve(A[:82], images=image)
    asker.serve(B[:82])
    assert (
        asker.serve(A[:82], images=[(70, 4, b"two")])[Cause.EVICTED] == 56
    )  # up to the image; the first three are still there
    asker = Asker(num_gpu=24)
    asker.serve(A[:42])
    asker.serve(B[:90])
    assert asker.serve(A[:82], images=image)[Cause.EVICTED] == 36
    asker = Asker(num_gpu=60)
    asker.match(A[:42])
    request, match = asker.match(A[:82], images=image)
    assert asker.admit(request, match)[Cause.UNCOMMITTED] == 40


def test_what_was_lost_behind_another_image_is_not_this_prompt_s() -> None:
    """Twenty blocks with one image were evicted, and parted from at the tenth; with another image ten were cached. So
    of twenty with that one ten were evicted, and the others are new."""
    one, two = [(12, 4, b"one")], [(12, 4, b"two")]
    asker = Asker(num_gpu=30)
    asker.serve(A[:82], images=one)
    asker.serve(B[:119])
    asker.serve([*A[:40], *C[:9]], images=one)
    asker.serve(B[200:319])
    asker.serve(A[:42], images=two)
    asker.serve(C[200:319])
    missed = asker.serve(A[:82], images=two)
    assert (missed[Cause.EVICTED], missed[Cause.NEW]) == (40, 40)
