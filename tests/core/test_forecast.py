"""Forecasts of plans from the steps of past runs, and from prices where there are none."""

import pytest
from msgspec.structs import replace

from app.core.pool.catalog import Limits, Price, Worker
from app.core.rating.economics import JournaledRun
from app.core.rating.forecast import Forecast, History, PlannedStep, forecast
from app.core.run.events import Event
from app.core.run.kinds import Kind
from tests.harness.stand_ins import PLAN_RUN, TEXTS, journal_of

ALPHA = Worker("alpha", "stub", "alpha", Price(input=1_000_000, output=2_000_000))
OTHER = replace(ALPHA, name="other", model="other")


def past(name: str = "run_past") -> JournaledRun:
    """A run of a chain of two steps of alpha, with 6 and 7 output tokens; each event comes a second after another."""
    events = journal_of(name, TEXTS)
    return JournaledRun(
        id=name,
        tenant="acme",
        key="key",
        tier="baton-mini",
        state="succeeded",
        topology="chain",
        degraded=False,
        created_at=events[0].at,
        ended=True,
        events=events,
    )


def chain(worker: Worker = ALPHA, size: int = 9) -> list[PlannedStep]:
    return [PlannedStep(worker, size, (), False, 100), PlannedStep(worker, size, (0,), True, 100)]


def forecast_for(steps: list[PlannedStep], runs: int) -> Forecast:
    return forecast(steps, Limits(), History([past(f"run_{n}") for n in range(runs)]))


def test_without_history_it_follows_from_prices_and_says_so() -> None:
    expected = forecast_for(chain(), 0)
    assert (expected.basis, expected.runs) == ("prices", 0)
    assert [(step.basis, step.samples) for step in expected.steps] == [("prices", 0)] * 2
    assert 0 < expected.usd.p10 <= expected.usd.p50 <= expected.usd.p90 <= expected.usd.most <= Limits().usd
    assert 0 < expected.seconds.p50 < expected.seconds.most == Limits().seconds
    assert expected.unpriced == ()
    assert forecast_for(chain(replace(ALPHA, price=Price(), priced=False)), 0).unpriced == (ALPHA.name,)


def test_it_expects_what_steps_at_the_same_place_took() -> None:
    expected = forecast_for(chain(), 5)
    assert (expected.basis, expected.runs) == ("history", 5)
    assert [(step.basis, step.samples) for step in expected.steps] == [("shape", 5)] * 2
    assert [step.output.p50 for step in expected.steps] == [6, 7]
    assert [step.seconds.p50 for step in expected.steps] == [2, 2], "from the intent of its call to its end"
    events = past().events
    first = next(event for event in events if event.kind is Kind.CALL_INTENDED)
    took = events[-1].at - first.at
    assert expected.seconds.p50 == pytest.approx(took), "with what came between the steps, and without the planning"


def test_the_wait_for_an_approval_is_no_time_that_a_plan_takes() -> None:
    """A plan that a caller sends, or of a fixed shape, is there at once; then somebody takes an hour to approve it."""
    events, wait = [], 0.0
    for event in past().events:
        more: dict[str, object] = {}
        if event.kind is Kind.ADMITTED:
            more["approval"] = {"seconds": 3_600.0, "workers": ["alpha"]}
        if event.kind is Kind.PLAN_OPENED:
            more["instant"] = True
        if event.kind is Kind.CALL_INTENDED and event.body["n"] is not None:
            wait = 3_600.0
        events.append(Event("run_past", event.seq, event.kind, event.at + wait, event.body | more))
    approved = replace(past(), events=tuple(events))
    expected = forecast(chain(), Limits(), History([approved] * 5))
    assert expected.seconds.p50 == pytest.approx(forecast_for(chain(), 5).seconds.p50)


def test_a_step_at_another_place_is_compared_with_those_in_its_role() -> None:
    alone = [PlannedStep(ALPHA, 9, (), True, 100)]
    assert [step.basis for step in forecast_for(alone, 5).steps] == ["worker"], (
        "no past step answers without reading another"
    )
    fan = [
        PlannedStep(ALPHA, 9, (), False, 100),
        PlannedStep(ALPHA, 9, (), False, 100),
        PlannedStep(ALPHA, 9, (0, 1), True, 100),
    ]
    assert [step.basis for step in forecast_for(fan, 5).steps] == ["role"] * 3
    strangers = forecast_for(chain(OTHER), 5)
    assert ([step.basis for step in strangers.steps], strangers.basis) == (["others"] * 2, "mixed")
    assert [step.basis for step in forecast_for(chain(), 4).steps] == ["worker"] * 2, "four of a shape are not enough"


def test_a_little_is_known_from_a_few_steps_and_nothing_from_a_card() -> None:
    """A card says how fast a model writes at its usual provider; a simulated worker, or one on another machine, takes
    a tenth of that."""
    few = forecast_for(chain(), 2)
    assert [(step.basis, step.samples) for step in few.steps] == [("worker", 4)] * 2
    assert few.seconds.p90 == pytest.approx(forecast_for(chain(), 5).seconds.p90)
    lonely = [PlannedStep(OTHER, 9, (), True, 100)]
    assert [(step.basis, step.samples) for step in forecast_for(lonely, 3).steps] == [("others", 6)], "in another role"
    assert forecast_for(lonely, 2).basis == "prices", "four steps of others are not enough"


def test_input_tokens_follow_the_bytes_of_what_is_sent() -> None:
    short, long = forecast_for(chain(size=90), 5).steps[0], forecast_for(chain(size=900), 5).steps[0]
    assert long.input.p50 == pytest.approx(10 * short.input.p50)
    assert long.usd.p50 > short.usd.p50


def test_what_was_only_planned_is_no_example() -> None:
    assert History([past(PLAN_RUN)]).runs == 0


def test_the_output_is_never_more_than_the_limit() -> None:
    capped = [replace(step, most_tokens=3) for step in chain()]
    assert [step.output.p90 for step in forecast_for(capped, 5).steps] == [3, 3]
