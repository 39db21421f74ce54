"""The words in which a run is explained."""

from collections.abc import Mapping
from typing import Any

from app.cli.runs import run_words
from app.core.run.kinds import DRIVER_LOST


def test_ratings_are_told_with_who_gave_them() -> None:
    rating = {"kind": "explicit", "source": "user", "version": None, "score": 0.5, "label": "slow", "at": 0.0}
    assert run_words.rating(rating) == "explicit, by user: 0.5 of 1, slow · 1970-01-01 00:00:00 UTC"
    sign = rating | {
        "kind": "implicit",
        "source": "abandoned",
        "version": "signs-1",
        "score": None,
        "label": "abandoned",
    }
    assert run_words.rating(sign).startswith("implicit, by abandoned signs-1: abandoned · ")


def test_rounds_are_explained() -> None:
    proposal: Mapping[str, Any] = {
        "mode": "first",
        "round": 2,
        "conductor": "model",
        "state": "accepted",
        "outage": False,
        "reasons": [],
        "topology": None,
        "steps": [],
        "attempts": [{"worker": "a"}],
    }
    assert run_words.proposal(proposal) == (
        "round 2, first proposal: a model planned it (a) · it accepted the previous answer"
    )
    assert run_words.proposal(proposal | {"topology": "single", "steps": [3]}).endswith("accepted · single of 1 step")
    lost = proposal | {"state": "rejected", "outage": True, "reasons": [DRIVER_LOST]}
    assert run_words.proposal(lost).endswith(" · engine lost"), "the conductor is not to blame"
    run: Mapping[str, Any] = {"proposals": [proposal], "rounds": 2, "degraded": True, "preview": False, "end": {}}
    assert run_words.why(run)[1] == "2 rounds: each was shown the previous answer"
    stopped = run_words.why(run | {"end": {"stopped": "run_over_budget"}})
    assert stopped[2] == "degraded: the last round failed (run_over_budget), so the previous answer is used"
    first = {**proposal, "round": 1, "topology": "chain", "steps": [0, 1]}
    failed = {**proposal, "state": "rejected", "outage": True}
    end = {"stopped": "run_over_budget", "fell_back": True}
    cut_short = run_words.why(run | {"proposals": [first], "rounds": 1, "end": end})
    assert "could not finish its plan (run_over_budget)" in cut_short[-1]
    one_round = run_words.why(run | {"proposals": [first, failed], "rounds": 1, "end": end})
    assert "the last round failed (run_over_budget)" in one_round[-1]


def test_only_a_fallback_has_a_rejected_plan_for_its_cause() -> None:
    rejected: Mapping[str, Any] = {"conductor": "model", "reasons": ["too many steps"], "round": 1}
    run: Mapping[str, Any] = {"rounds": 1, "degraded": False, "preview": False, "end": {}}
    cause = "1 earlier proposal could not be used: too many steps"
    repaired = run_words.why(run | {"proposals": [rejected, {"conductor": "model", "reasons": [], "round": 1}]})
    assert repaired == [f"a model planned it; {cause}"]
    fallback = run_words.why(run | {"proposals": [rejected, {"conductor": "fallback", "reasons": [], "round": 1}]})
    assert fallback == [f"the fallback worker answers alone, because {cause}"]


def test_an_estimate_says_what_it_rests_on() -> None:
    spread = {"p10": 0.1, "p50": 0.2, "p90": 0.3, "worst": 0.4}
    steps = [{"worker": "abacus", "basis": "worker"}, {"worker": "sage", "basis": "prices"}]
    forecast = {"basis": "mixed", "runs": 6, "cost_usd": spread, "seconds": spread, "steps": steps, "unpriced": []}
    assert "from 6 past runs, for sage from prices and usual sizes; at most" in run_words.estimate(forecast)
    forecast |= {"basis": "history", "runs": 1, "steps": steps[:1]}
    assert "from 1 past run; at most" in run_words.estimate(forecast)
    forecast |= {"basis": "prices", "runs": 0, "steps": steps[1:]}
    assert run_words.estimate(forecast).endswith("from prices and usual sizes; at most $0.40")
    forecast |= {"unpriced": ["sage"]}
    assert run_words.estimate(forecast).endswith("at most $0.40, without sage, whose price is not known")


def test_a_planning_call_says_how_much_of_the_conversation_it_was_not_shown() -> None:
    usage = {"input": 1, "output": 1, "cached": 0, "reasoning": 0, "estimated": False}
    call = {"worker": "planner", "outcome": "ok", "usage": usage, "cost_usd": 0.0, "seconds": 1.0, "passed_over": []}
    assert "not shown" not in run_words.attempt(call | {"left_out": 0})
    words = "12,345 characters of the conversation not shown to it"
    assert words in run_words.attempt(call | {"left_out": 12_345}).split(" · ")
