"""The breaker of a worker: what ejects it, for how long, who may probe it, and what the retry budget lets through."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from app.core.pool import breaker
from app.core.pool.breaker import (
    ENOUGH_SUCCESSES,
    FAILURES_IN_A_ROW,
    FIRST_CEILING_SECONDS,
    FIRST_MISCONFIGURED_SECONDS,
    FREE_RETRIES,
    LAST_CEILING_SECONDS,
    LAST_MISCONFIGURED_SECONDS,
    LONGEST_RATE_LIMIT_SECONDS,
    OUTLIER_CALLS,
    PROBE_SECONDS,
    RECOVERED_SECONDS,
    RETRY_SHARE,
    SHORTEST_ANSWER_SECONDS,
    SHORTEST_EJECTION_SECONDS,
    WINDOW_SECONDS,
    Breaker,
    CallEnd,
    Offer,
    Pick,
    Place,
    Verdict,
    after_call,
    before_call,
    call_not_made,
    pick,
    worth_waiting,
)

VERDICTS = st.sampled_from(["good", "failing", "rate_limited", "misconfigured", "silent"])
NEW = Breaker()
PLACES = st.sampled_from(["first", "retry", "replacement"])


def end_call(breaker: Breaker, verdict: Verdict, now: float, *, took: float = 0.0, chance: float = 0.5) -> Breaker:
    """A call of `took` seconds ends now."""
    return after_call(breaker, CallEnd(verdict, now - took), now=now, chance=chance)


def failing(times: int, now: float = 0.0, breaker: Breaker = NEW, chance: float = 0.5) -> Breaker:
    """So many failures in a row."""
    for _ in range(times):
        breaker = end_call(breaker, "failing", now, chance=chance)
    return breaker


def open_for(seconds: float, reason: str = "failing") -> Breaker:
    """A breaker that opened at 0."""
    return Breaker(reason=reason, since=0.0, until=seconds, ejections=1, failures=FAILURES_IN_A_ROW)


# -- ejection


def test_failures_in_a_row_eject_and_one_success_between_them_does_not() -> None:
    assert failing(FAILURES_IN_A_ROW - 1).state(0.0) == "closed"
    assert failing(FAILURES_IN_A_ROW).state(0.0) == "open"
    mixed = failing(FAILURES_IN_A_ROW - 1, breaker=end_call(failing(FAILURES_IN_A_ROW - 1), "good", 0.0))
    assert mixed.state(0.0) == "closed"


def test_half_of_enough_calls_eject_though_never_many_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(OUTLIER_CALLS // 2 - 1):
        breaker = end_call(end_call(breaker, "failing", 1.0), "good", 1.0)
    assert breaker.state(1.0) == "closed"
    assert failing(1, 1.0, end_call(breaker, "good", 1.0)).state(1.0) == "open"
    assert failing(1, 1.0, end_call(end_call(breaker, "good", 1.0), "good", 1.0)).state(1.0) == "closed"


def test_what_is_older_than_the_window_does_not_count_in_the_ratio() -> None:
    breaker = Breaker()
    for _ in range(OUTLIER_CALLS // 2 - 1):
        breaker = end_call(end_call(breaker, "failing", 1.0), "good", 1.0)
    later = end_call(end_call(breaker, "good", WINDOW_SECONDS + 6.0), "failing", WINDOW_SECONDS + 6.0)
    assert later.state(WINDOW_SECONDS + 6.0) == "closed"


@pytest.mark.parametrize("verdict", ["failing", "rate_limited"])
def test_a_rate_limit_without_a_time_counts_like_any_failure(verdict: Verdict) -> None:
    breaker = Breaker()
    for _ in range(FAILURES_IN_A_ROW):
        assert breaker.state(0.0) == "closed"
        breaker = end_call(breaker, verdict, 0.0)
    assert breaker.objection(0.0) == verdict


@pytest.mark.parametrize(
    ("wait_seconds", "seconds"), [(0.5, 0.5), (20.0, 20.0), (86_400.0, LONGEST_RATE_LIMIT_SECONDS)]
)
def test_a_rate_limit_ejects_at_once_for_as_long_as_it_says(wait_seconds: float, seconds: float) -> None:
    breaker = after_call(Breaker(), CallEnd("rate_limited", 0.0, wait_seconds), now=1.0, chance=0.9)
    assert breaker.objection(1.0) == "rate_limited"
    assert breaker.until == 1.0 + seconds
    assert breaker.ejections == 0, "the next outlier's ejection is a first one"


def test_a_rate_limit_of_no_time_at_all_is_a_failure() -> None:
    assert after_call(Breaker(), CallEnd("rate_limited", 0.0, 0.0), now=1.0, chance=0.9).state(1.0) == "closed"


def test_a_late_rate_limit_makes_an_ejection_longer_and_never_shorter() -> None:
    breaker = open_for(10.0)
    longer = after_call(breaker, CallEnd("rate_limited", -5.0, 60.0), now=1.0, chance=0.0)
    assert (longer.reason, longer.until) == ("failing", 61.0)
    assert after_call(longer, CallEnd("rate_limited", -5.0, 1.0), now=2.0, chance=0.0).until == 61.0


def test_a_wrong_key_ejects_at_once_and_for_longer() -> None:
    breaker = end_call(Breaker(), "misconfigured", 0.0, chance=1.0)
    assert breaker.objection(0.0) == "misconfigured"
    assert breaker.until == FIRST_MISCONFIGURED_SECONDS > FIRST_CEILING_SECONDS


@pytest.mark.parametrize(
    ("verdict", "first", "last"),
    [
        ("failing", FIRST_CEILING_SECONDS, LAST_CEILING_SECONDS),
        ("misconfigured", FIRST_MISCONFIGURED_SECONDS, LAST_MISCONFIGURED_SECONDS),
    ],
)
@given(chance=st.floats(0, 1, exclude_max=True), times=st.integers(1, 40))
def test_an_ejection_lasts_a_random_time_below_a_ceiling_that_doubles(
    verdict: Verdict, first: float, last: float, chance: float, times: int
) -> None:
    breaker, now = end_call(failing(FAILURES_IN_A_ROW - 1), verdict, 0.0, chance=chance), 0.0
    for number in range(1, times):
        now = breaker.until
        breaker = end_call(before_call(breaker, "first", now), verdict, now, chance=chance)
        assert breaker.ejections == number + 1
    ceiling = min(first * 2 ** (times - 1), last)
    assert breaker.until - now == pytest.approx(
        SHORTEST_EJECTION_SECONDS + chance * (ceiling - SHORTEST_EJECTION_SECONDS)
    )


def test_after_a_calm_time_the_next_ejection_is_a_first_one() -> None:
    back = end_call(replace(open_for(1.0), ejections=4), "good", 2.0)
    assert failing(FAILURES_IN_A_ROW, 2.0 + RECOVERED_SECONDS, back).ejections == 5
    assert failing(FAILURES_IN_A_ROW, 2.1 + RECOVERED_SECONDS, back).ejections == 1


# -- what says nothing


@given(VERDICTS, st.floats(-5, 5))
def test_news_from_before_the_last_change_changes_nothing(verdict: Verdict, now: float) -> None:
    breaker = replace(Breaker(), since=6.0, failures=FAILURES_IN_A_ROW - 1)
    assert after_call(breaker, CallEnd(verdict, now), now=7.0, chance=0.0) == breaker


def test_cancelled_and_refused_calls_never_count() -> None:
    breaker = failing(FAILURES_IN_A_ROW - 1)
    for _ in range(100):
        assert end_call(breaker, "silent", 0.0) == breaker


def test_a_failure_while_it_is_ejected_is_no_news() -> None:
    breaker = open_for(10.0)
    assert failing(20, 5.0, breaker) == breaker


# -- the way back


def test_only_one_call_probes_a_half_open_breaker() -> None:
    breaker = open_for(10.0)
    assert breaker.objection(9.9) == "failing"
    assert (breaker.state(10.0), breaker.objection(10.0)) == ("half_open", "")
    probing = before_call(breaker, "first", 10.0)
    assert probing.objection(10.1) == "probing"
    assert probing.objection(10.0 + PROBE_SECONDS) == "", "a probe that takes for ever keeps nobody out for ever"


def test_a_probe_that_succeeds_closes_it_and_forgets_what_was_before() -> None:
    breaker = before_call(failing(FAILURES_IN_A_ROW), "first", 9.0)
    back = end_call(before_call(breaker, "retry", breaker.until), "good", breaker.until + 1.0, took=1.0)
    assert (back.state(back.since), back.failures, back.unanswered, back.ejections) == ("closed", 0, 0, 1)
    assert failing(FAILURES_IN_A_ROW - 1, back.since, back).state(back.since) == "closed"


def test_what_led_to_an_ejection_does_not_lead_to_the_next_one() -> None:
    breaker = Breaker()
    for _ in range(OUTLIER_CALLS // 2):
        breaker = end_call(end_call(breaker, "good", 0.0), "failing", 0.0)
    assert breaker.state(0.0) == "open"
    back = end_call(before_call(breaker, "first", breaker.until), "good", breaker.until)
    assert failing(1, back.since, back).state(back.since) == "closed"


def test_a_probe_that_fails_opens_it_again() -> None:
    probing = before_call(open_for(10.0), "first", 10.0)
    again = end_call(probing, "failing", 11.0, took=1.0, chance=1.0)
    assert (again.state(11.0), again.until) == ("open", 11.0 + 2 * FIRST_CEILING_SECONDS)


def test_a_rate_limited_probe_opens_it_for_as_long_as_it_says() -> None:
    probing = before_call(open_for(10.0), "first", 10.0)
    again = after_call(probing, CallEnd("rate_limited", 10.0, 7.0), now=11.0, chance=0.0)
    assert (again.reason, again.until) == ("rate_limited", 18.0)


def test_a_probe_that_says_nothing_lets_the_next_one_through() -> None:
    probing = before_call(open_for(10.0), "first", 10.0)
    assert end_call(probing, "silent", 11.0, took=1.0).objection(11.0) == ""
    assert call_not_made(probing).objection(10.5) == ""


def test_the_end_of_an_older_call_does_not_end_the_probe() -> None:
    probing = before_call(open_for(10.0), "first", 10.0)
    for verdict in ("silent", "failing", "good"):
        ended = after_call(probing, CallEnd(verdict, -1.0), now=10.5, chance=0.0)
        assert ended.objection(10.5) == "probing"


def test_a_success_while_it_is_ejected_takes_it_back() -> None:
    """It was called as the least bad one, and it works."""
    assert end_call(open_for(10.0), "good", 5.0, took=1.0).state(5.0) == "closed"


# -- the retry budget


def test_first_calls_need_no_budget() -> None:
    breaker = Breaker()
    for _ in range(100):
        assert breaker.within_retry_budget("first", 0.0)
        breaker = before_call(breaker, "first", 0.0)


@pytest.mark.parametrize("place", ["retry", "replacement"])
def test_low_traffic_may_retry_a_few_times(place: Place) -> None:
    breaker = Breaker()
    for _ in range(FREE_RETRIES):
        assert breaker.within_retry_budget(place, 0.0)
        breaker = before_call(breaker, place, 0.0)
    assert not breaker.within_retry_budget(place, 0.0)
    assert breaker.within_retry_budget(place, WINDOW_SECONDS + 6.0), "and again, a window later"


def test_nobody_waits_for_scouts_that_came_back_without_a_word() -> None:
    """They were refused for what was asked of them: that is no news, and there will be none."""
    breaker = Breaker()
    for _ in range(FREE_RETRIES):
        breaker = before_call(breaker, "replacement", 0.0)
    for left in range(FREE_RETRIES, 0, -1):
        assert breaker.awaits_scouts(1.0), f"{left} are out"
        breaker = after_call(breaker, CallEnd("silent", 0.0, extra=True), now=1.0, chance=0.0)
    assert not breaker.awaits_scouts(1.0)
    assert not breaker.within_retry_budget("replacement", 1.0), "they have cost what they have cost"


def test_a_scout_that_is_not_sent_takes_no_place() -> None:
    breaker = Breaker()
    for _ in range(FREE_RETRIES):
        breaker = before_call(breaker, "replacement", 0.0)
    breaker = call_not_made(breaker, extra=True)
    assert breaker.within_retry_budget("replacement", 1.0)
    assert not before_call(breaker, "replacement", 1.0).within_retry_budget("replacement", 1.0)


def test_a_success_of_a_scout_lets_others_follow_but_buys_no_retry() -> None:
    breaker = Breaker()
    for _ in range(FREE_RETRIES):
        breaker = before_call(breaker, "replacement", 0.0)
    followed = end_call(breaker, "good", 1.0)
    assert followed.within_retry_budget("replacement", 1.0)
    assert not followed.within_retry_budget("retry", 1.0)


@settings(deadline=None)
@given(st.lists(st.tuples(PLACES, st.floats(0, 2), st.booleans()), max_size=300))
def test_in_a_storm_attempts_beyond_the_first_stay_within_the_share(
    attempts: list[tuple[Place, float, bool]],
) -> None:
    """Nothing succeeds; every call that the budget lets through is made. Within every window, whatever is asked for."""
    breaker, now = Breaker(), 0.0
    firsts: list[float] = []
    extras: list[float] = []
    for place, pause, fails in attempts:
        now += pause
        if breaker.within_retry_budget(place, now):
            (firsts if place == "first" else extras).append(now)
            breaker = before_call(breaker, place, now)
            within = sum(at > now - WINDOW_SECONDS + 5.0 for at in extras)
            assert place == "first" or within <= max(
                FREE_RETRIES, RETRY_SHARE * sum(at > now - WINDOW_SECONDS for at in firsts)
            )
        if fails:
            breaker = after_call(breaker, CallEnd("failing", now), now=now, chance=0.0)


def test_at_high_traffic_the_share_is_exact() -> None:
    breaker, extras = Breaker(), 0
    for number in range(1_000):
        breaker = before_call(breaker, "first", number / 100)
        while breaker.within_retry_budget("retry", number / 100):
            breaker, extras = before_call(breaker, "retry", number / 100), extras + 1
    assert extras == RETRY_SHARE * 1_000


# -- which one


def offer(worker: str, breaker: Breaker = NEW, place: Place = "first") -> Offer:
    """An offer."""
    return Offer(worker, place, breaker)


def test_the_first_without_an_objection_is_picked_and_the_others_are_accounted_for() -> None:
    spent = NEW
    for _ in range(FREE_RETRIES):
        spent = before_call(spent, "replacement", 1.0)
    slow = replace(Breaker(), seconds=(50.0,) * ENOUGH_SUCCESSES)
    offers = [
        offer("limited", open_for(9.0, "rate_limited")),
        offer("probed", before_call(open_for(0.5), "first", 1.0)),
        offer("spent", spent, "replacement"),
        offer("slow", slow),
        offer("well"),
        offer("next"),
    ]
    passed = (("limited", "rate_limited"), ("probed", "probing"), ("spent", "retry_budget"), ("slow", "no_time"))
    assert pick(offers, now=1.0, seconds_left=40.0) == Pick("well", passed)


def test_if_all_are_ejected_the_least_bad_one_is_called_all_the_same() -> None:
    offers = [
        offer("wrong", open_for(2.0, "misconfigured")),
        offer("later", open_for(9.0)),
        offer("sooner", open_for(5.0, "rate_limited")),
        offer("last", open_for(8.0)),
    ]
    passed = (("wrong", "misconfigured"), ("later", "failing"), ("last", "failing"))
    assert pick(offers, now=1.0, seconds_left=40.0) == Pick("sooner", passed, "rate_limited")
    assert pick(offers[:1], now=1.0, seconds_left=40.0) == Pick("wrong", (), "misconfigured")


def test_nobody_is_picked_without_time_or_budget() -> None:
    assert pick([], now=0.0, seconds_left=9.0) == Pick(None)
    assert pick([offer("any")], now=0.0, seconds_left=SHORTEST_ANSWER_SECONDS / 2) == Pick(None, (("any", "no_time"),))


def test_what_the_pool_file_states_counts_until_enough_successes_are_known() -> None:
    def pick_worker(successes: int, left: float) -> str | None:
        slow = Breaker()
        for number in range(successes):
            slow = end_call(slow, "good", 10.0 * number, took=0.5)
        return pick([replace(offer("slow", slow), stated=1.0)], now=0.0, seconds_left=left).worker

    assert [pick_worker(0, left) for left in (0.9, 1.0)] == [None, "slow"]
    assert [pick_worker(ENOUGH_SUCCESSES - 1, left) for left in (0.9, 1.0)] == [None, "slow"]
    assert [pick_worker(ENOUGH_SUCCESSES, left) for left in (0.4, 0.9)] == [None, "slow"]


@pytest.mark.parametrize(
    ("successes", "hopeless"), [(ENOUGH_SUCCESSES - 1, SHORTEST_ANSWER_SECONDS), (ENOUGH_SUCCESSES, 2.0), (100, 2.0)]
)
def test_a_worker_is_hopeless_below_the_quickest_of_its_latest_successes(successes: int, hopeless: float) -> None:
    slow = Breaker()
    for number in range(successes):
        slow = end_call(slow, "good", 10.0 * number, took=2.0 + number % 2)
    assert slow.least_seconds() == hopeless
    assert pick([offer("slow", slow)], now=0.0, seconds_left=1.9).worker == (None if hopeless == 2.0 else "slow")


BREAKERS = st.builds(
    Breaker,
    reason=st.sampled_from(["", "failing", "rate_limited", "misconfigured"]),
    since=st.just(0.0),
    until=st.floats(0, 100),
    probe_until=st.floats(0, 100),
    failures=st.integers(0, 9),
    unanswered=st.integers(0, 9),
    slices=st.builds(
        lambda firsts, extras: (breaker.Slice(10, firsts, extras),), st.integers(0, 50), st.integers(0, 50)
    ),
)


@given(st.lists(st.tuples(BREAKERS, PLACES), max_size=6))
def test_some_eligible_worker_is_always_called_while_there_is_time_and_budget(
    offered: list[tuple[Breaker, Place]],
) -> None:
    offers = [offer(str(number), breaker, place) for number, (breaker, place) in enumerate(offered)]
    choice = pick(offers, now=50.0, seconds_left=100.0)
    affordable = [offer for offer in offers if offer.breaker.within_retry_budget(offer.place, 50.0)]
    assert (choice.worker is not None) == bool(affordable)
    assert choice.worker not in {name for name, _ in choice.passed_over}
    well = [offer.worker for offer in affordable if not offer.breaker.objection(50.0)]
    if well:
        assert (choice.worker, choice.despite) == (well[0], "")
    elif choice.worker is not None:
        assert choice.despite


# -- waiting for news


def test_a_step_waits_while_scouts_are_out_and_nothing_bad_was_heard() -> None:
    breaker = Breaker()
    for _ in range(FREE_RETRIES):
        breaker = before_call(breaker, "replacement", 0.0)
    offers = [offer("dead", open_for(9.0), "replacement"), offer("well", breaker, "replacement")]
    assert worth_waiting(offers[1:], now=1.0, seconds_left=9.0)
    assert worth_waiting(offers, now=1.0, seconds_left=9.0), "rather than call one that is ejected"
    assert not worth_waiting(
        [offer("well", end_call(breaker, "failing", 1.0), "replacement")], now=1.0, seconds_left=9.0
    )
    assert not worth_waiting([offer("well", end_call(breaker, "good", 1.0), "replacement")], now=1.0, seconds_left=9.0)
    assert not worth_waiting(offers[:1], now=1.0, seconds_left=9.0)
    assert not worth_waiting([*offers, offer("idle", Breaker(), "replacement")], now=1.0, seconds_left=9.0)
    assert not worth_waiting(offers, now=1.0, seconds_left=SHORTEST_ANSWER_SECONDS / 2)
    assert not worth_waiting([], now=1.0, seconds_left=9.0)


# -- anything at all


ARROWS = {"closed": {"closed", "open"}, "open": {"open", "closed"}, "half_open": {"half_open", "open", "closed"}}


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(VERDICTS, st.floats(0, 40), st.floats(0, 50), st.floats(0, 1, exclude_max=True), st.booleans()),
        max_size=60,
    )
)
def test_every_history_keeps_to_the_arrows(
    story: list[tuple[Verdict, float, float, float, bool]],
) -> None:
    worker_breaker, now = Breaker(), 0.0
    for verdict, pause, took, chance, asks in story:
        now += pause
        before = worker_breaker.state(now)
        wait_seconds = 9.0 if asks else None
        worker_breaker = before_call(worker_breaker, "first", now) if pause else worker_breaker
        worker_breaker = after_call(worker_breaker, CallEnd(verdict, now - took, wait_seconds), now=now, chance=chance)
        after = worker_breaker.state(now)
        assert after in ARROWS[before]
        assert before == "closed" or after != "closed" or verdict == "good"
        assert worker_breaker.until - now <= max(
            LAST_CEILING_SECONDS, LAST_MISCONFIGURED_SECONDS, LONGEST_RATE_LIMIT_SECONDS
        )
        assert len(worker_breaker.slices) <= breaker.WINDOW_SLICES + 1
        assert len(worker_breaker.seconds) <= breaker.REMEMBERED_SUCCESSES
