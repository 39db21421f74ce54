"""Rules about a selector's decision: its probabilities add up, and the plan is the arm that was drawn."""

from collections.abc import Iterator, Mapping
from typing import Any

from app.audit.account import Account, Proposal
from app.audit.report import Violation

SELECTOR, MODEL = "selector", "model"
CRUMB = 1e-9
"""The error that rounding may leave in a sum of probabilities."""


def decided(run: Account, proposal: Proposal) -> Iterator[Violation]:
    """Each first proposal of a selector has a decision, and no other proposal has one."""
    body, seq = proposal.opened.body, proposal.opened.seq
    decision = body.get("decision")
    if (decision is not None) != (body["conductor"] == SELECTOR and body["mode"] == "first"):
        yield run.says("decision-missing", seq, "a decision where none is made, or none where one is")
    if decision is None:
        return
    if not isinstance(decision, dict):
        yield run.says("decision-wrong", seq, "the decision is not an object")
    elif fault := _faulty(decision):
        yield run.says("decision-wrong", seq, fault)
    elif fault := _unfollowed(run, proposal, decision):
        yield run.says("decision-unfollowed", seq, fault)


def _faulty(decision: Mapping[str, Any]) -> str:
    """Return the fault of a decision, regardless of the run; empty if it has none."""
    texts = ("layer", "policy", "version", "features", "action", "seed")
    candidates, propensity = decision.get("candidates"), decision.get("propensity")
    if any(not isinstance(decision.get(name), str) for name in texts) or not isinstance(candidates, dict):
        return "the decision lacks a field"
    if any(not isinstance(one, float) or not 0 <= one <= 1 for one in candidates.values()):
        return "a candidate's probability is not valid"
    if abs(sum(candidates.values()) - 1) > CRUMB:
        return f"the probabilities add up to {sum(candidates.values()):.6f}"
    if not propensity or candidates.get(decision["action"]) != propensity:
        return "the propensity is not the probability of the action"
    if not decision.get("explore") and propensity != 1:
        return "a choice that must not explore was drawn at random"
    return ""


def _unfollowed(run: Account, proposal: Proposal, decision: Mapping[str, Any]) -> str:
    """Return the fault of a decision that the request forbids, or that the plan does not follow; empty if none."""
    if decision.get("explore") and not run.admitted.get("explore", True):
        return "the request forbids to explore"
    _, *workers = str(decision["action"]).split(" ")
    if decision["action"] != MODEL and [step.plan.body["worker"] for step in proposal.steps] != workers:
        return f"the plan is not {decision['action'][:80]}"
    pool = set(run.admitted["pool"])
    for arm in decision["candidates"]:
        if outside := sorted(set(arm.split(" ")[1:]) - pool):
            return f"an arm has a worker outside the pool: {outside[0]}"
    return ""
