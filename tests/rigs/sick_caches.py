"""Caches that are set up or used badly, each in one way, and the words that the doctor must find for it."""

from __future__ import annotations

from collections.abc import Callable

from tests.rigs.asker import Asker

NUM_PROMPTS, NUM_ROUNDS = 8, 5


def prompt(number: int, num_tokens: int = 42) -> list[int]:
    return [1000 * (number + 1) + i for i in range(num_tokens)]


def rounds(asker: Asker, num_tokens: int = 42, num_prompts: int = NUM_PROMPTS) -> Asker:
    """A few prompts, in turn, again and again."""
    for number in list(range(num_prompts)) * NUM_ROUNDS:
        asker.serve(prompt(number, num_tokens))
    return asker


def copied_down(**config: object) -> Asker:
    """A GPU tier that holds three prompts, and a CPU tier that holds all."""
    return Asker(num_gpu=34, num_cpu=200, cpu_write_policy="write_through", **config)


def never_waits() -> Asker:
    """Each request allocates while its load is on its way."""
    asker = rounds(copied_down())
    for number in list(range(NUM_PROMPTS)) * NUM_ROUNDS:
        request, match = asker.match(prompt(number))
        asker.admit(request, match)
        asker.cache.commit(request, request.num_tokens)
        asker.cache.release(request)
        asker.client.land_all()
    return asker


def slow_tier() -> Asker:
    asker = copied_down(load_policy="auto", prefill_tokens_per_second=1e12)
    asker.cache._movement.speeds._block_bytes = 1
    asker.cache._movement.speeds.cpu.note(1.0, 1.0)
    return rounds(asker)


def rank_down() -> Asker:
    asker = rounds(copied_down())
    asker.client.up = False
    return asker


def rank_off() -> Asker:
    asker = rank_down()
    asker.client.is_off = True
    return asker


def a_namespace_for_each() -> Asker:
    asker = Asker(num_gpu=400)
    for number in range(40):
        asker.serve(prompt(0), namespace=f"request {number}")
    return asker


def a_time_in_front() -> Asker:
    asker = Asker(num_gpu=900)
    for number in range(40):
        asker.serve([7000 + number, *prompt(0)])
    return asker


def a_time_in_the_middle() -> Asker:
    """At token 50 of 200, over two blocks of 16 tokens."""
    asker = Asker(num_gpu=900, size=16)
    for number in range(40):
        tokens = prompt(0, 200)
        tokens[46:50] = [7000 + number] * 4
        asker.serve(tokens)
    return asker


def a_time_in_front_of_a_small_pool() -> Asker:
    """Which holds three of these prompts."""
    asker = Asker(num_gpu=34)
    for number in range(40):
        asker.serve([7000 + number, *prompt(0)])
    return asker


def a_time_in_the_middle_of_a_small_pool() -> Asker:
    asker = Asker(num_gpu=34)
    for number in range(40):
        asker.serve([*range(12), 7000 + number, *prompt(0)])
    return asker


def never_committed() -> Asker:
    asker = Asker(num_gpu=200)
    for number in list(range(NUM_PROMPTS)) * NUM_ROUNDS:
        request, match = asker.match(prompt(number))
        asker.admit(request, match)
        asker.cache.release(request)
    return asker


def bursts_of_equal_prompts() -> Asker:
    """Ten at a time, and each time another prompt."""
    asker = Asker(num_gpu=2000)
    for number in range(5):
        burst = [asker.match(prompt(number)) for _ in range(10)]
        for request, match in burst:
            asker.admit(request, match)
        for request, _ in burst:
            asker.cache.commit(request, request.num_tokens)
            asker.cache.release(request)
    return asker


def other_images() -> Asker:
    asker = Asker(num_gpu=400)
    for number in range(30):
        asker.serve(prompt(0), images=[(0, 40, f"upload {number}".encode())])
    return asker


def outputs_kept_out() -> Asker:
    """Conversations whose answers are as long as their questions, and come back as part of the next prompt."""
    asker = Asker(num_gpu=2000, cache_outputs=False)
    for number in range(8):
        tokens = prompt(number, 40)
        for turn in range(4):
            request, match = asker.match(tokens)
            asker.admit(request, match)
            answer = [900_000 + 1000 * number + 100 * turn + i for i in range(40)]
            request.append_output(answer)
            asker.cache.allocate(request, 10)
            asker.cache.commit(request, request.num_tokens)
            asker.cache.release(request)
            tokens = [*tokens, *answer]
    return asker


def resets() -> Asker:
    asker = Asker(num_gpu=100)
    for _ in range(30):
        asker.serve(prompt(0))
        asker.cache.reset()
    return asker


SICK: dict[str, tuple[Callable[[], Asker], str]] = {
    "cpu_tier_short": (
        lambda: rounds(Asker(num_gpu=34, num_cpu=50, cpu_write_policy="write_through")),
        "num_cpu_blocks",
    ),
    "gpu_short": (lambda: rounds(Asker(num_gpu=34)), "CPU tier"),
    "tier_slow": (slow_tier, "computing"),
    "loads_late": (never_waits, "match.wait"),
    "rank_down": (rank_down, "started again by itself, up to"),
    "rank_off": (rank_off, "restart-rank"),
    "namespace_for_each": (a_namespace_for_each, "namespace"),
    "first_blocks_differ": (a_time_in_front, "second block"),
    "first_blocks_differ, small pool": (a_time_in_front_of_a_small_pool, "their first block"),
    "later_blocks_differ": (a_time_in_the_middle, "tokens 32 to 47"),
    "later_blocks_differ, small pool": (a_time_in_the_middle_of_a_small_pool, "tokens 12 to 15"),
    "never_committed": (never_committed, "cache.commit"),
    "computed_at_once": (bursts_of_equal_prompts, "another request was computing them"),
    "blocks_too_large": (lambda: rounds(Asker(num_gpu=100, size=32), 60), "block_size"),
    "other_images": (other_images, "image"),
    "setting_forbids": (lambda: rounds(copied_down(load_policy="never")), "load_policy is 'never'"),
    "setting_forbids, outputs": (outputs_kept_out, "cache_outputs is off"),
    "resets": (resets, "weights"),
}
