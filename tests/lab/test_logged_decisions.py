"""Decisions are read from a journal: usable runs, their probabilities, and what other policies would have done."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from app.core.plan.templates import arm_of_workers
from app.core.pool.catalog import Price, SelectorSpec, Worker
from app.core.rating.features import Features, features
from app.core.rating.feedback import Feedback
from app.core.rating.posterior import Posterior, Rating, update_posterior
from app.core.run.events import Event, Kind
from app.lab.logged_decisions import (
    PLACES,
    Beliefs,
    LoggedDecision,
    choice,
    hash_features,
    read_decision,
    score,
    worth,
)

DECISION = {
    "layer": "selector", "policy": "selector-2/mini", "version": "7-abc", "features": "ref",
    "candidates": {"answer luna": 0.6, "answer sol": 0.3, "model": 0.1}, "action": "answer sol", "propensity": 0.3,
    "explored": True, "explore": 0.05, "seed": "s",
}  # fmt: skip


def journal(*facts: tuple[Kind, dict[str, Any]]) -> list[Event]:
    return [Event("run", seq, kind, 0.0, body) for seq, (kind, body) in zip(count(1), facts, strict=False)]


def open_plan(proposal: int = 0, mode: str = "first", **more: Any) -> tuple[Kind, dict[str, Any]]:
    body = {"proposal": proposal, "base": 0, "mode": mode, "conductor": "model", "order": ["sol", "luna"], **more}
    return Kind.PLAN_OPENED, body


def step(n: int, worker: str, *access: Any, proposal: int = 0, **more: Any) -> tuple[Kind, dict[str, Any]]:
    body = {"proposal": proposal, "n": n, "worker": worker, "subtask": "", "access": list(access), "answers": False}
    return Kind.PLAN_STEP, body | more


def accept_plan(proposal: int = 0) -> tuple[Kind, dict[str, Any]]:
    return Kind.PLAN_ACCEPTED, {"proposal": proposal, "call": "", "steps": 1, "topology": "single"}


SUCCEEDED: tuple[Kind, dict[str, Any]] = (Kind.SUCCEEDED, {})
PLANNED = (
    open_plan(),
    step(0, "sol", "user", probability=0.5),
    step(1, "luna", "user", 0, probability=0.8),
    accept_plan(),
    SUCCEEDED,
)


def test_a_selector_tells_every_arms_probability() -> None:
    decision = read_decision(journal(open_plan(decision=DECISION), step(0, "sol", "user"), accept_plan(), SUCCEEDED))
    assert decision is not None
    assert (decision.layer, decision.shape, decision.action, decision.propensity) == ("selector", "", "answer sol", 0.3)
    assert decision.candidates == DECISION["candidates"]
    assert decision.features == "ref"
    assert decision.was_drawn


def test_a_models_plan_is_its_workers_given_its_shape() -> None:
    decision = read_decision(journal(*PLANNED))
    assert decision is not None
    assert (decision.layer, decision.shape, decision.action) == ("model", '[["user"], ["user", 0]]', "sol luna")
    assert decision.propensity == pytest.approx(0.4)


def test_steps_are_counted_within_their_plan() -> None:
    """The repaired plan's steps begin at 2; it was no free choice, but its form is read alike."""
    further = [
        open_plan(1),
        step(2, "sol", "user", proposal=1, probability=0.5),
        step(3, "sol", 2, proposal=1, probability=0.5),
    ]
    decision = read_decision(journal(*further, accept_plan(1), SUCCEEDED))
    assert decision is not None
    assert decision.shape == '[["user"], [0]]'


@pytest.mark.parametrize(
    "facts",
    [
        PLANNED[:-1],
        (*PLANNED[:-2], SUCCEEDED),
        (open_plan(mode="repair"), *PLANNED[1:]),
        (open_plan(mode="fallback"), *PLANNED[1:]),
        (open_plan(), step(0, "sol", "user"), accept_plan(), SUCCEEDED),
        (open_plan(), step(0, "sol", "user", probability=0.5), step(1, "sol", "user"), accept_plan(), SUCCEEDED),
        (open_plan(decision=DECISION), open_plan(1, "fallback"), step(0, "sol", proposal=1), accept_plan(1), SUCCEEDED),
    ],
    ids=["no answer", "no plan", "a repair", "a fallback", "no probability", "not of every step", "given up"],
)
def test_what_was_not_drawn_or_has_no_answer_is_no_row(facts: tuple[tuple[Kind, dict[str, Any]], ...]) -> None:
    assert read_decision(journal(*facts)) is None


def read_selected(**changes: Any) -> LoggedDecision:
    decision = read_decision(
        journal(open_plan(decision={**DECISION, **changes}), step(0, "sol"), accept_plan(), SUCCEEDED)
    )
    assert decision is not None
    return decision


def test_policies_over_arms() -> None:
    assert choice("greedy", read_selected()) == {"answer luna": 1.0}
    assert choice("uniform", read_selected()) == pytest.approx(
        {"answer luna": 1 / 3, "answer sol": 1 / 3, "model": 1 / 3}
    )
    assert choice("always model", read_selected()) == {"model": 1.0}
    assert choice("always answer nova", read_selected()) is None, "it was no candidate there"
    assert not read_selected(action="answer luna", propensity=1.0, candidates={"answer luna": 1.0}).was_drawn


def test_policies_over_a_models_workers() -> None:
    decision = read_decision(journal(*PLANNED))
    assert decision is not None
    assert choice("uniform", decision) == {pair: 0.25 for pair in ("sol sol", "sol luna", "luna sol", "luna luna")}
    assert choice("always luna sol", decision) == {"luna sol": 1.0}
    assert choice("always luna", decision) is None, "a plan of another shape"
    assert choice("always luna nova", decision) is None
    assert choice("greedy", decision) is None, "nobody knows what else it would have preferred"


def ratings() -> Iterator[Feedback]:
    """Two of one source, one of another, and a sign."""
    yield Feedback("2", "run", "t", "k", 5.0, "explicit", "user", "1", 0.5)
    yield Feedback("1", "run", "t", "k", 4.0, "explicit", "user", "1", 0.0)
    yield Feedback("3", "run", "t", "", 3.0, "grader", "exact", "grading-1", 1.0)
    yield Feedback("4", "run", "t", "", 9.0, "implicit", "abandoned", "signs-1", label="abandoned")


def test_a_run_is_worth_the_mean_of_the_latest_scores() -> None:
    all_ratings = list(ratings())
    assert score(all_ratings) == 0.75
    assert score(all_ratings[3:]) is None
    assert score([]) is None


def test_costs_take_their_share_of_a_score() -> None:
    spec = SelectorSpec(cost=0.2, full_usd=1_000)
    all_ratings = list(ratings())
    assert worth(all_ratings, 500, spec) == pytest.approx(0.75 * 0.9)
    assert worth(all_ratings, 9_000, spec) == pytest.approx(0.75 * 0.8)
    assert worth(all_ratings, 500, None) == 0.75
    assert worth([], 500, spec) is None


def test_the_current_policy_is_what_the_selector_believes_now() -> None:
    spec = SelectorSpec(templates=("answer",))
    workers = {name: Worker(name, "p", name) for name in ("sol", "luna")}
    sight = features("What is 2 + 2?")
    luna, sol = arm_of_workers("answer", ["luna"]), arm_of_workers("answer", ["sol"])
    posterior = Posterior()
    for arm, value in ((luna, 1.0), (sol, 0.0)) * 5:
        posterior = update_posterior(posterior, spec, list(workers.values()), Rating(arm, sight, value, 10, 5.0))
    assert Beliefs(posterior, spec, workers).choice(read_selected(), sight) == {"answer luna": 1.0}
    only = read_selected(candidates={"answer sol": 1.0}, propensity=1.0)
    assert Beliefs(posterior, spec, workers).choice(only, sight) == {"answer sol": 1.0}
    assert Beliefs(posterior, spec, {}).choice(read_selected(), sight) is None


def test_words_are_folded_and_counts_stay() -> None:
    hashed = hash_features(Features(((3, 0.5), (3 + PLACES, 0.25), (7, -1.0)), (1.0, 2.0)))
    assert len(hashed) == PLACES + 2
    assert (hashed[3], hashed[7], hashed[-2:]) == (0.75, -1.0, (1.0, 2.0))


TAKEN = {**DECISION, "candidates": {"accept": 0.7, "redo luna": 0.3}, "action": "accept", "propensity": 0.7}
TWICE = (open_plan(decision=DECISION), step(0, "sol", "user"), accept_plan(), open_plan(1, decision=TAKEN, round=2))


def test_the_decision_of_a_second_round_follows_the_first() -> None:
    decision = read_decision(journal(*TWICE, accept_plan(1), SUCCEEDED))
    assert decision is not None
    assert (decision.action, decision.further.action if decision.further else "") == ("answer sol", "accept")
    assert decision.further is not None
    assert decision.further.propensity == 0.7
    assert choice("always answer sol", decision.further) == {"accept": 1.0}
    assert choice("greedy", decision.further) == {"accept": 1.0}
    stopped = Kind.SUCCEEDED, {"stopped": "run_over_budget"}
    assert read_decision(journal(*TWICE, SUCCEEDED)) is None, "its plan was refused"
    assert read_decision(journal(*TWICE, accept_plan(1), stopped)) is None, "nobody came to do it"


@pytest.mark.parametrize(("spent", "taken"), [(0, "accept"), (2_000, "redo luna")])
def test_the_current_policy_knows_in_a_second_round_what_the_first_has_cost(spent: int, taken: str) -> None:
    """As the selector does: once an answer has cost what counts as the whole, another call costs nothing more."""
    spec = SelectorSpec(templates=("answer",), cost=0.9, full_usd=1_000)
    workers = {name: Worker(name, "p", name, Price(output=3_000_000)) for name in ("sol", "luna")}
    sight = features("What is 2 + 2?")
    posterior = Posterior()
    for name, value in (("luna", 1.0), ("sol", 0.0)) * 5:
        rating = Rating(arm_of_workers("answer", [name]), sight, value, 950, 5.0)
        posterior = update_posterior(posterior, spec, list(workers.values()), rating)
    call = Kind.CALL_FINISHED, {"call": "c", "n": 0, "usd": spent}
    decision = read_decision(journal(*TWICE[:3], call, TWICE[3], accept_plan(1), SUCCEEDED))
    assert decision is not None
    assert decision.further is not None
    assert Beliefs(posterior, spec, workers).choice(decision.further, sight, decision) == {taken: 1.0}
