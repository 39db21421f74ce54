"""Rate limits: no window of a minute has more than its limit, and the journal says when runs are over."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.pool.rates import (
    BUSY_SECONDS,
    CLAIM_SECONDS,
    WINDOW_SECONDS,
    RateLimits,
    RateReply,
    RateRequest,
    RunUse,
    Window,
    decide,
)

NOW = 1_000_000.0


class Key:
    """One key's window, as the database keeps it, and the runs of a journal."""

    def __init__(self, **limits: int) -> None:
        self.limits = RateLimits(**limits)
        self.body = Window().to_bytes()
        self.runs: dict[str, RunUse] = {}

    def ask(self, now: float, *, run: str = "", tokens: int = 0, resumes: str = "") -> RateReply:
        window = Window.from_bytes(self.body)
        request = RateRequest((("key", self.limits),), run=run, tokens=tokens, resumes=resumes)
        (reply,) = decide({"key": window}, [request], self.runs, now)
        self.body = window.to_bytes()
        return reply

    def end(self, run: str, tokens: int, at: float) -> None:
        self.runs[run] = RunUse(seq=9, tokens=tokens, waits=False, ended_at=at)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=60), st.integers(1, 6))
def test_no_minute_has_more_requests_than_its_limit(pauses: Sequence[float], rpm: int) -> None:
    key, now, passed = Key(rpm=rpm), NOW, []
    for pause in pauses:
        now += pause
        if key.ask(now).refusal is None:
            passed.append(now)
    for last in passed:
        assert sum(last - WINDOW_SECONDS < moment <= last for moment in passed) <= rpm


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 40), st.integers(0, 100)), min_size=1, max_size=40),
    st.integers(20, 60),
)
def test_no_minute_has_more_tokens_than_its_limit(requests: Sequence[tuple[float, int, int]], tpm: int) -> None:
    """Each run is over before the next request comes, and uses no more than was reserved for it."""
    key, now, used = Key(tpm=tpm), NOW, []
    for number, (pause, reserved, share) in enumerate(requests):
        now += pause
        if key.ask(now, run=f"run_{number}", tokens=reserved).refusal is None:
            tokens = min(reserved, tpm) * share // 100
            key.end(f"run_{number}", tokens, now)
            used.append((now, tokens))
    for last, _ in used:
        assert sum(tokens for at, tokens in used if last - WINDOW_SECONDS < at <= last) <= tpm


def test_the_wait_that_a_refusal_names_is_enough_and_needed() -> None:
    key = Key(rpm=3)
    for at in (0.0, 10.0, 20.0):
        assert key.ask(NOW + at).refusal is None
    refusal = key.ask(NOW + 30.0).refusal
    assert refusal is not None
    assert (refusal.reason, refusal.seconds) == ("requests", 30.0)
    assert key.ask(NOW + 59.0).refusal is not None
    assert key.ask(NOW + 60.0).refusal is None


def test_tokens_are_reserved_for_open_runs_and_settled_with_what_they_used() -> None:
    key = Key(tpm=100)
    assert [key.ask(NOW, run=run, tokens=40).refusal is None for run in ("a", "b", "c")] == [True, True, False]
    key.end("a", 10, NOW + 1)
    reply = key.ask(NOW + 1, run="c", tokens=40)
    assert reply.refusal is None
    assert [figures.remaining for figures in reply.figures] == [100 - 10 - 40 - 40]


def test_the_wait_for_tokens_counts_on_what_open_runs_give_back() -> None:
    key = Key(tpm=100)
    assert key.ask(NOW, run="a", tokens=90).refusal is None
    refusal = key.ask(NOW + 5, run="b", tokens=90).refusal
    assert refusal is not None
    assert refusal.seconds == BUSY_SECONDS
    key.end("a", 50, NOW + 6)
    refusal = key.ask(NOW + 7, run="b", tokens=90).refusal
    assert refusal is not None
    assert refusal.seconds == WINDOW_SECONDS - 7


def test_a_run_that_used_more_than_its_limit_is_paid_for_in_the_following_minutes() -> None:
    key = Key(tpm=100)
    assert key.ask(NOW, run="a", tokens=250).refusal is None, "it is alone"
    assert key.ask(NOW, run="b", tokens=1).refusal is not None
    key.end("a", 350, NOW + 5)
    assert key.ask(NOW + 124, run="b", tokens=99).refusal is not None
    assert key.ask(NOW + 5 + 150, run="b", tokens=99).refusal is None


def test_the_journal_says_which_runs_are_open() -> None:
    key = Key(concurrency=2)
    assert [key.ask(NOW, run=run).refusal is None for run in ("a", "b", "c")] == [True, True, False]
    key.runs |= {run: RunUse(seq=3, tokens=0, waits=False) for run in ("a", "b")}
    assert key.ask(NOW + 3600, run="c").refusal is not None, "open runs hold their places for as long as they take"
    key.end("a", 5, NOW + 3600)
    assert key.ask(NOW + 3600, run="c").refusal is None
    key.runs["b"] = RunUse(seq=7, tokens=0, waits=True)
    assert key.ask(NOW + 3601, run="d").refusal is None, "a run that waits for its caller holds no place"


def test_a_place_comes_back_when_its_gateway_died_before_the_admission() -> None:
    key = Key(concurrency=1, tpm=100)
    assert key.ask(NOW, run="a", tokens=100).refusal is None
    assert key.ask(NOW + CLAIM_SECONDS - 1, run="b", tokens=100).refusal is not None
    assert key.ask(NOW + CLAIM_SECONDS, run="b", tokens=100).refusal is None


def test_a_turn_is_settled_with_its_own_tokens() -> None:
    key = Key(tpm=1_000, concurrency=1)
    key.runs["talk"] = RunUse(seq=8, tokens=700, waits=True)
    assert key.ask(NOW, run="new", resumes="talk", tokens=500).refusal is None
    assert key.ask(NOW + 1, run="b", tokens=1).refusal is not None, "the turn is not begun yet"
    key.runs["talk"] = RunUse(seq=12, tokens=750, waits=True)
    reply = key.ask(NOW + 2, run="b", tokens=100)
    assert reply.refusal is None
    assert reply.figures[0].remaining == 1_000 - 50 - 100


def test_a_new_run_with_tool_results_of_an_ended_run_holds_its_place_from_the_beginning() -> None:
    """Such results are only the history of a new run, whose admission may take a moment."""
    key = Key(tpm=1_000, concurrency=1)
    key.end("talk", 700, NOW - 5)
    assert key.ask(NOW, run="new", resumes="talk", tokens=500).refusal is None
    assert key.ask(NOW + 1, run="b", tokens=1).refusal is not None, "it is not in the journal yet"
    key.runs["new"] = RunUse(seq=1, tokens=0, waits=False)
    assert key.ask(NOW + CLAIM_SECONDS, run="b", tokens=1).refusal is not None
    key.end("new", 50, NOW + 40)
    reply = key.ask(NOW + 41, run="b", tokens=100)
    assert reply.refusal is None
    assert reply.figures[0].remaining == 1_000 - 50 - 100


def test_a_request_counts_in_all_of_its_windows_or_in_none() -> None:
    windows = {"key": Window(), "tenant": Window()}
    request = RateRequest((("key", RateLimits(rpm=5)), ("tenant", RateLimits(rpm=1))))
    first, second = decide(windows, [request, request], {}, NOW)
    assert first.refusal is None
    assert second.refusal is not None
    assert second.refusal.window == "tenant"
    assert second.figures[0].limit == 1, "the window that has least left is shown"
    assert windows["key"].figures(RateLimits(rpm=5), NOW)[0].remaining == 4


def test_a_clock_that_was_ahead_locks_nobody_out() -> None:
    key = Key(rpm=1)
    assert key.ask(NOW + 1e6).refusal is None
    assert key.ask(NOW).refusal is not None
    assert key.ask(NOW + WINDOW_SECONDS).refusal is None


def test_what_gateways_with_different_clocks_reserve_is_given_back() -> None:
    key = Key(tpm=1_000)
    assert key.ask(NOW + 0.10, run="a", tokens=400).refusal is None, "a gateway whose clock is ahead"
    assert key.ask(NOW + 0.05, run="b", tokens=400).refusal is None, "and another one, ahead by less"
    assert key.ask(NOW, run="c", tokens=100).refusal is None
    key.end("a", 10, NOW + 1)
    key.end("b", 20, NOW + 1)
    reply = key.ask(NOW + 2, run="d", tokens=500)
    assert reply.refusal is None
    assert reply.figures[0].remaining == 1_000 - 10 - 20 - 100 - 500
