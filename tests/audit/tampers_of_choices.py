"""Falsifications of what a selector decided."""

from collections.abc import Callable
from typing import Any

from tests.audit.forgery import Case, ForgedRun, case, in_first, in_last, put

OPENED, STEP, INTENDED = "plan.opened", "plan.step", "call.intended"


def decided(change: Callable[[dict[str, Any]], object]) -> Callable[[ForgedRun], None]:
    """Alter the decision of the run's first plan."""
    return lambda run: change(run.first(OPENED)["decision"]) and None


def likelier(decision: dict[str, Any]) -> None:
    """One arm gets more than the others have left."""
    decision["candidates"][next(name for name in decision["candidates"] if name != decision["action"])] += 0.01


def favoured(decision: dict[str, Any]) -> None:
    """The action is said to have been more probable, all in agreement, but for the sum."""
    decision["propensity"] = decision["candidates"][decision["action"]] = 0.99


def another_arm(run: ForgedRun) -> None:
    """The decision is rewritten, consistent in itself, to another arm than the one that was carried out."""
    decision = run.first(OPENED)["decision"]
    other = next(name for name in decision["candidates"] if name.split()[1:] != decision["action"].split()[1:])
    decision |= {"action": other, "propensity": decision["candidates"][other]}


def stranger(decision: dict[str, Any]) -> None:
    """An arm with a worker who could not take part."""
    decision["candidates"]["answer planner"] = 0.0


def undecided(run: ForgedRun) -> None:
    del run.first(OPENED)["decision"]


def decided_by_nobody(run: ForgedRun) -> None:
    run.first(OPENED)["decision"] = {"layer": "selector"}


def masked(decision: dict[str, Any], **price: float) -> None:
    """One arm more is left out, at this price."""
    arm = next(name for name in decision["candidates"] if name != decision["action"])
    decision["candidates"][decision["action"]] += decision["candidates"].pop(arm)
    decision["propensity"] = decision["candidates"][decision["action"]]
    decision["masked"][arm] = price
    decision["predicted"].pop(arm, None)


def unmasked(decision: dict[str, Any]) -> None:
    """One arm that was left out stood to be drawn."""
    arm, _ = decision["masked"].popitem()
    decision["candidates"][arm] = 0.0


def over_budget(run: ForgedRun) -> None:
    """The run ends with the error although a step had given an answer."""
    run.events[-1].kind = "run.over_budget"
    for name in ("step", "answer", "finish", "stopped", "fell_back"):
        run.end.pop(name, None)
    run.end.update(step=None, error="run_over_budget")


CASES: tuple[Case, ...] = (
    case("decision-missing", "a selector without a decision", "chosen", undecided),
    case("decision-missing", "a decision of a fixed conductor", "single", decided_by_nobody),
    case("decision-wrong", "the decision is a text", "chosen", in_first(OPENED, put(decision="so be it"))),
    case("decision-wrong", "an arm is made likelier", "chosen", decided(likelier)),
    case("decision-wrong", "the action is made likelier", "chosen", decided(favoured)),
    case("decision-wrong", "another propensity", "chosen", decided(lambda entry: entry.update(propensity=0.123))),
    case("decision-wrong", "the seed is left out", "chosen", decided(lambda entry: entry.pop("seed"))),
    case("decision-wrong", "a sure choice that was none", "chosen", decided(lambda entry: entry.update(explore=0.0))),
    case("decision-unfollowed", "another arm", "chosen", another_arm),
    case("decision-unfollowed", "a worker outside the pool", "chosen", decided(stranger)),
    case("mask-wrong", "an arm that could be paid", "chosen_within_means", decided(
        lambda entry: masked(entry, usd=990))),
    case("mask-wrong", "at another price", "chosen_within_means", decided(lambda entry: entry["masked"].update(
        {next(iter(entry["masked"])): {"usd": 1_001}}))),
    case("mask-wrong", "more was left", "chosen_within_means", decided(lambda entry: entry["left"].update(usd=1_001))),
    case("mask-wrong", "an arm too dear is drawn", "chosen_within_means", decided(unmasked)),
    case("mask-wrong", "a text for the arms", "chosen_within_means", decided(
        lambda entry: entry.update(masked="dear"))),
    case("mask-wrong", "a worker that could be paid", "single", in_first(INTENDED, put(
        passed_over=[{"worker": "beta", "reason": "over_budget"}]))),
    case("stand-in-wrong", "a step that is asked for something else", "debated", in_first(STEP, put(complete=True))),
    case("stand-in-wrong", "the answering step", "single", in_first(STEP, put(complete=True))),
    case("end-unfounded", "there was money", "cut_short", in_last("step.failed", put(error="worker_failed"))),
    case("end-unfounded", "no step may stand in", "cut_short", in_first(STEP, lambda step: step.pop("complete"))),
    case("end-unfounded", "over budget with a step that may stand in", "cut_short", over_budget),
    case("answer-wrong", "another step stands in", "cut_short", lambda run: run.end.update(step=1)),
    case("degraded-wrong", "not degraded though cut short", "cut_short", lambda run: run.end.update(degraded=False)),
    case("queued-too-early", "before the plan is accepted", "conducted", in_first(OPENED, put(waits=True))),
    case("request-altered", "not all was shown", "conducted", in_first(INTENDED, put(left_out=7), n=None)),
    case("brief-wrong", "more time than the run has", "conducted", in_first(INTENDED, put(seconds_left=99), n=None)),
    case("cut-wrong", "below the floor", "chosen_within_means", in_first(INTENDED, put(max_tokens=255))),
    case("cut-wrong", "not cut at all", "chosen_within_means", in_first(INTENDED, lambda intent: intent.update(
        wanted_tokens=intent["max_tokens"]))),
    case("decision-unfollowed", "explored although forbidden", "chosen_for_sure",
         decided(lambda entry: entry.update(explore=0.05))),
)  # fmt: skip
