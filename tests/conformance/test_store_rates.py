"""Every promise of the store seam about rate limits; both databases, and several processes over each."""

import asyncio

from app.core.pool.catalog import Amount
from app.core.pool.rates import CLAIM_SECONDS, WINDOW_SECONDS, RateLimits, RateReply, RateRequest
from app.core.run.events import Kind
from app.store.protocol import Entry, Projection, Store
from tests.conformance.entries import Opener, admission_entry
from tests.harness.raw_facts import Raw

NOW = 1_000.0


async def ask(store: Store, limits: RateLimits, *, run: str = "", tokens: int = 0, now: float = NOW) -> RateReply:
    (reply,) = await store.count_requests([RateRequest((("key:k", limits),), run=run, tokens=tokens)], now)
    return reply


def end_entry(run: str, tokens: int, at: float) -> Entry:
    return Entry(run, at, (Raw(Kind.SUCCEEDED, {}),), epoch=1, spent=Amount(0, tokens), row=Projection("succeeded"))


async def test_several_gateways_let_no_more_requests_through_than_the_limit(opener: Opener) -> None:
    limits = RateLimits(rpm=20, tpm=1_000, concurrency=15)
    async with opener() as first_store, opener() as second_store, opener() as third_store:
        calls = [
            ask(store, limits, run=f"run_{n}_{i}", tokens=70)
            for n, store in enumerate((first_store, second_store, third_store))
            for i in range(8)
        ]
        replies = await asyncio.gather(*calls)
        assert sum(reply.refusal is None for reply in replies) == 1_000 // 70
        last = await ask(second_store, limits)
    assert [figures.remaining for figures in last.figures] == [20 - 14 - 1, 1_000 - 14 * 70]


async def test_the_commit_that_ends_a_run_gives_its_place_and_its_tokens_back(opener: Opener) -> None:
    """Whichever gateway had let it in, and whether or not that still exists."""
    limits = RateLimits(tpm=100, concurrency=1)
    async with opener() as gone:
        assert (await ask(gone, limits, run="a", tokens=90)).refusal is None
        await gone.append(admission_entry("a"))
    async with opener() as other:
        refused = await ask(other, limits, run="b", tokens=50, now=NOW + CLAIM_SECONDS)
        assert refused.refusal is not None
        assert refused.refusal.reason == "concurrency"
        await other.append(end_entry("a", 30, NOW + 1))
        reply = await ask(other, limits, run="b", tokens=50, now=NOW + 1)
    assert reply.refusal is None
    assert [figures.remaining for figures in reply.figures] == [100 - 30 - 50]


async def test_a_run_that_was_not_begun_is_given_back(store: Store) -> None:
    limits = RateLimits(rpm=9, concurrency=1)
    rate_request = RateRequest((("key:k", limits),), run="a")
    await store.count_requests([rate_request], NOW)
    await store.give_back(rate_request)
    reply = await ask(store, limits, run="b")
    assert reply.refusal is None
    assert reply.figures[0].remaining == 9 - 2, "the request counts all the same"


async def test_windows_in_which_nothing_counts_are_forgotten(store: Store) -> None:
    limits = RateLimits(rpm=1)
    assert (await ask(store, limits)).refusal is None
    assert await store.forget_windows(NOW + WINDOW_SECONDS - 1, 10) == 0
    assert (await ask(store, limits)).refusal is not None
    assert await store.forget_windows(NOW + WINDOW_SECONDS, 10) == 1
    assert await store.forget_windows(NOW + WINDOW_SECONDS, 10) == 0
    assert (await ask(store, limits)).refusal is None
