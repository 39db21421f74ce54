"""A process's view of its workers' health: choices, counters, log lines, and outcomes from other processes."""

import logging
from math import inf
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from app.core.message.chat import Usage
from app.core.pool.breaker import ENOUGH_SUCCESSES, FAILURES_IN_A_ROW, FREE_RETRIES, Place, Verdict
from app.core.pool.catalog import Catalog, ConductorSpec, Limits, ProviderSpec, Tier, Worker
from app.core.run.events import CallFinished
from app.engine.worker_health import MOST_COUNTED_CALLS, Health, WorkerChoice
from app.telemetry import Telemetry

NAMES = ("ada", "bob", "cyd")
WORKERS = {name: Worker(name, "near" if name != "cyd" else "far", f"{name}-1") for name in NAMES}
SPECS = {name: ProviderSpec(name, "openai", f"http://{name}") for name in ("near", "far")}
CATALOG = Catalog(
    SPECS, WORKERS, {"mini": Tier("mini", NAMES, ConductorSpec("fixed"), "ada", {"medium": Limits()})}, {}, "d"
)
FIRST: list[tuple[Worker, Place]] = [(worker, "first") for worker in WORKERS.values()]


class Clock:
    """Seconds that tests move."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    """The clock of `health`."""
    return Clock()


@pytest.fixture
def telemetry() -> Telemetry:
    """Its counters."""
    return Telemetry()


@pytest.fixture
def health(clock: Clock, telemetry: Telemetry) -> Health:
    """A process that has heard nothing yet."""
    new_health = Health(telemetry, monotonic=clock, random=Random(1).random)
    new_health.use_catalog(CATALOG)
    return new_health


def settle(health: Health, name: str, verdict: Verdict, times: int = 1, wait_seconds: float | None = None) -> None:
    """Calls of our own end."""
    for number in range(times):
        health.note_own_call(f"call-{name}-{number}", WORKERS[name], verdict, 1_000.0, wait_seconds)


def finish_call(call: str, outcome: str = "error", **more: Any) -> CallFinished:
    """The outcome of a call."""
    return CallFinished(call, 0, outcome, Usage(), **{"usd": 0, "seconds": 0.5} | more)


def test_the_first_worker_that_is_well_is_chosen(health: Health) -> None:
    settle(health, "ada", "failing", FAILURES_IN_A_ROW)
    chosen = health.choose(FIRST, 60.0)
    assert chosen == WorkerChoice(WORKERS["bob"], (("ada", "failing"),))
    assert health.choose(FIRST[1:], 60.0) == WorkerChoice(WORKERS["bob"])
    assert health.choose(FIRST[:1], 60.0).despite == "failing"


def test_nobody_is_chosen_without_time(health: Health) -> None:
    nobody = health.choose(FIRST, 0.01)
    assert nobody.worker is None
    assert nobody.lacks_time
    assert not health.choose([], 60.0).lacks_time


def test_the_worst_of_the_ejected_come_first(health: Health) -> None:
    settle(health, "ada", "misconfigured")
    settle(health, "bob", "rate_limited", wait_seconds=2.0)
    settle(health, "cyd", "rate_limited", wait_seconds=99.0)
    assert list(health.ejected_workers(list(WORKERS.values())).items()) == [
        ("ada", "misconfigured"),
        ("cyd", "rate_limited"),
        ("bob", "rate_limited"),
    ]
    assert health.ejected_workers([]) == {}


def test_a_worker_that_may_be_probed_is_not_ejected(health: Health, clock: Clock) -> None:
    settle(health, "ada", "rate_limited", wait_seconds=2.0)
    clock.seconds += 2.0
    assert health.ejected_workers([WORKERS["ada"]]) == {}


def test_a_call_with_an_alternative_is_refused_but_for_the_probe(health: Health, clock: Clock) -> None:
    ada = WORKERS["ada"]
    assert health.refusal(ada, 60.0) == ""
    assert health.refusal(ada, 0.01) == "no_time"
    settle(health, "ada", "rate_limited", wait_seconds=2.0)
    assert health.refusal(ada, 60.0) == "rate_limited"
    clock.seconds += 2.0
    assert [health.refusal(ada, 60.0) for _ in range(3)] == ["", "probing", "probing"]
    health.cancel_call(ada)
    assert health.refusal(ada, 60.0) == ""


def test_retries_and_refused_retries_are_counted(health: Health, telemetry: Telemetry) -> None:
    for _ in range(FREE_RETRIES + 2):
        health.choose([(WORKERS["ada"], "retry"), (WORKERS["bob"], "replacement")], 60.0)
    counted = telemetry.registry.get_sample_value
    assert counted("baton_retries_total", {"worker": "ada", "kind": "retry"}) == FREE_RETRIES
    assert counted("baton_retries_total", {"worker": "bob", "kind": "replacement"}) == 2
    assert counted("baton_retry_budget_exhausted_total", {"worker": "ada"}) == 2


def test_a_step_may_wait_for_news_of_scouts(health: Health) -> None:
    offers: list[tuple[Worker, Place]] = [(WORKERS["bob"], "replacement")]
    assert not health.is_worth_waiting(offers, 60.0)
    for _ in range(FREE_RETRIES):
        health.choose(offers, 60.0)
    assert health.is_worth_waiting(offers, 60.0)
    settle(health, "bob", "good")
    assert not health.is_worth_waiting(offers, 60.0)


def test_ejections_and_returns_are_counted_shown_and_logged(
    health: Health, clock: Clock, telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    level = {"worker": "ada"}
    with caplog.at_level(logging.INFO, "baton"):
        settle(health, "ada", "failing", FAILURES_IN_A_ROW + 3)
        assert telemetry.registry.get_sample_value("baton_breaker_state", level) == 2
        clock.seconds += 10.0
        assert telemetry.registry.get_sample_value("baton_breaker_state", level) == 1, "nobody has to call for that"
        health.note_own_call("probe", WORKERS["ada"], "good", clock.seconds, None)
    assert telemetry.registry.get_sample_value("baton_breaker_state", level) == 0
    counted = telemetry.registry.get_sample_value("baton_ejections_total", {"worker": "ada", "reason": "failing"})
    assert counted == 1
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "A worker keeps failing and is ejected; others are called instead."),
        ("INFO", "A worker answers again and is called as before."),
    ]
    fields = caplog.records[0].__dict__["fields"]
    assert (fields["worker"], fields["reason"]) == ("ada", "failing")
    assert 1.0 <= fields["seconds"] <= 5.0


# -- another pool


def test_another_pool_keeps_what_is_known_of_unchanged_workers(health: Health, telemetry: Telemetry) -> None:
    for name in NAMES:
        settle(health, name, "misconfigured")
    moved = {**SPECS, "far": replace(SPECS["far"], base_url="http://elsewhere")}
    priced = {
        **WORKERS,
        "ada": replace(WORKERS["ada"], name="adele"),
        "bob": replace(WORKERS["bob"], model="bob-2"),
    }
    workers = {worker.name: worker for worker in priced.values()}
    health.use_catalog(replace(CATALOG, providers=moved, workers=workers))
    assert health.ejected_workers(list(workers.values())) == {"adele": "misconfigured"}, (
        "the same model, under another name"
    )
    sample = telemetry.registry.get_sample_value
    assert sample("baton_breaker_state", {"worker": "adele"}) == 2
    assert sample("baton_breaker_state", {"worker": "ada"}) is None
    assert sample("baton_breaker_state", {"worker": "cyd"}) == 0


def test_a_worker_that_was_gone_comes_back_unknown(health: Health) -> None:
    settle(health, "cyd", "misconfigured")
    health.note_sign_of_life(WORKERS["cyd"])
    health.use_catalog(replace(CATALOG, workers={"ada": WORKERS["ada"]}))
    health.use_catalog(CATALOG)
    assert health.ejected_workers(list(WORKERS.values())) == {}
    assert health.seconds_silent(WORKERS["cyd"]) == inf


def test_a_new_key_of_a_provider_ends_the_ejection_of_its_workers(health: Health) -> None:
    for name in NAMES:
        settle(health, name, "misconfigured")
    health.forget_providers({"far"})
    near = {name: "misconfigured" for name, worker in WORKERS.items() if worker.provider != "far"}
    assert 0 < len(near) < len(WORKERS)
    assert health.ejected_workers(list(WORKERS.values())) == near


def test_calls_that_began_before_a_provider_was_corrected_say_nothing_of_it(health: Health, clock: Clock) -> None:
    clock.seconds += 10.0
    health.use_catalog(replace(CATALOG, providers={**SPECS, "far": replace(SPECS["far"], base_url="http://new")}))
    health.forget_providers({"near"})
    for name in NAMES:
        settle(health, name, "misconfigured")
    assert health.ejected_workers(list(WORKERS.values())) == {}


# -- other processes


def test_calls_of_other_processes_are_as_good_as_our_own(health: Health) -> None:
    for number in range(FAILURES_IN_A_ROW):
        assert health.ejected_workers([WORKERS["ada"]]) == {}
        health.note_journaled("ada", finish_call(f"their-{number}", blamed="failing"))
    assert health.ejected_workers([WORKERS["ada"]]) == {"ada": "failing"}
    health.note_journaled("bob", finish_call("last", blamed="rate_limited", retry_after=60.0))
    assert health.ejected_workers([WORKERS["bob"]]) == {"bob": "rate_limited"}


def test_what_says_nothing_there_says_nothing_here(health: Health) -> None:
    for number in range(20):
        health.note_journaled("ada", finish_call(f"their-{number}", "cancelled"))
        health.note_journaled("ada", finish_call(f"lost-{number}", "unknown", seconds=0.0))
        health.note_journaled("nobody", finish_call(f"gone-{number}", blamed="failing"))
    assert health.ejected_workers(list(WORKERS.values())) == {}
    settle(health, "ada", "failing", FAILURES_IN_A_ROW - 1)
    health.note_journaled("ada", finish_call("good", "ok", seconds=0.0))
    settle(health, "ada", "failing", FAILURES_IN_A_ROW - 1)
    assert health.ejected_workers(list(WORKERS.values())) == {}


def test_a_call_is_counted_once_however_often_its_outcome_is_received(health: Health) -> None:
    """Our own comes back from the journal, and each driver of a run that changes hands in this process reads it."""
    for number in range(FAILURES_IN_A_ROW - 1):
        health.note_own_call(f"call-{number}", WORKERS["ada"], "failing", 1_000.0, None)
        for _ in range(2):
            health.note_journaled("ada", finish_call(f"call-{number}", blamed="failing"))
            health.note_journaled("bob", finish_call(f"their-{number}", blamed="failing"))
    assert health.ejected_workers(list(WORKERS.values())) == {}
    health.note_journaled("ada", finish_call("last", blamed="failing"))
    assert health.ejected_workers(list(WORKERS.values())) == {"ada": "failing"}


def test_what_is_received_late_says_nothing_of_a_worker_that_has_answered_since(
    health: Health, clock: Clock, telemetry: Telemetry
) -> None:
    """Its calls began before the worker was ejected and taken back, as the times of their events show."""
    ada, counted = WORKERS["ada"], telemetry.registry.get_sample_value
    settle(health, "ada", "failing", FAILURES_IN_A_ROW)
    clock.seconds += 5.0
    for number in range(FAILURES_IN_A_ROW):
        health.note_journaled("ada", finish_call(f"during-{number}", blamed="failing"), age=5.5)
    assert counted("baton_ejections_total", {"worker": "ada", "reason": "failing"}) == 1
    health.note_own_call("probe", ada, "good", clock.seconds, None)
    for number in range(FAILURES_IN_A_ROW):
        health.note_journaled("ada", finish_call(f"late-{number}", blamed="failing"), age=1.0)
        health.note_journaled("ada", finish_call(f"limited-{number}", blamed="rate_limited", retry_after=2.0), age=3.0)
    assert health.ejected_workers([ada]) == {}
    health.note_journaled("ada", finish_call("limited", blamed="rate_limited", retry_after=5.0), age=3.0)
    assert health.ejected_workers([ada]) == {"ada": "rate_limited"}
    clock.seconds += 2.0
    assert health.ejected_workers([ada]) == {}, "it asked for five seconds, of which three were over"


def test_the_time_for_which_an_outcome_was_on_its_way_is_no_time_of_the_worker(health: Health) -> None:
    for number in range(ENOUGH_SUCCESSES):
        health.note_journaled("ada", finish_call(f"their-{number}", "ok", seconds=0.5), age=10.0)
    assert health.refusal(WORKERS["ada"], 0.4) == "no_time"
    assert health.refusal(WORKERS["ada"], 0.6) == ""


def test_what_is_remembered_of_calls_is_bounded(health: Health) -> None:
    for number in range(MOST_COUNTED_CALLS + 100):
        health.note_own_call(f"call-{number}", WORKERS["ada"], "good", 1_000.0, None)
        health.note_journaled("ada", finish_call(f"their-{number}", "ok"))
    assert len(health._counted_calls) == MOST_COUNTED_CALLS
    assert f"call-{MOST_COUNTED_CALLS + 99}" in health._counted_calls
