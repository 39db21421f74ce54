"""Rules about a selector's decision: what it says of its probabilities adds up, and the plan is what was drawn."""

from collections.abc import Iterator, Mapping
from typing import Any

from app.audit.account import Account, Proposal
from app.audit.report import Violation

SELECTOR, MODEL = "selector", "model"
CRUMB = 1e-9
"""What rounding may leave of a sum of probabilities."""


def decided(run: Account, proposal: Proposal) -> Iterator[Violation]:
    """Each first proposal of a selector has a decision, and no other one has."""
    body, seq = proposal.opened.body, proposal.opened.seq
    decision = body.get("decision")
    if (decision is not None) != (body["conductor"] == SELECTOR and body["mode"] == "first"):
        yield run.says("decision-missing", seq, "a decision where none is made, or none where one is")
    if decision is None:
        return
    if not isinstance(decision, dict):
        yield run.says("decision-wrong", seq, "the decision is none")
    elif fault := _faulty(decision):
        yield run.says("decision-wrong", seq, fault)
    elif fault := _unfollowed(run, proposal, decision):
        yield run.says("decision-unfollowed", seq, fault)


def _faulty(decision: Mapping[str, Any]) -> str:
    """What is wrong with it in itself."""
    texts = ("layer", "policy", "version", "features", "action", "seed")
    candidates, propensity = decision.get("candidates"), decision.get("propensity")
    if any(not isinstance(decision.get(name), str) for name in texts) or not isinstance(candidates, dict):
        return "the decision lacks what it should say"
    if any(not isinstance(one, float) or not 0 <= one <= 1 for one in candidates.values()):
        return "a candidate's probability is none"
    if abs(sum(candidates.values()) - 1) > CRUMB:
        return f"the probabilities add up to {sum(candidates.values()):.6f}"
    if not propensity or candidates.get(decision["action"]) != propensity:
        return "the propensity is not the probability of the action"
    if not decision.get("explore") and propensity != 1:
        return "a choice without leave to explore was left to chance"
    return ""


def _unfollowed(run: Account, proposal: Proposal, decision: Mapping[str, Any]) -> str:
    """Whether it was made as the request allows, and whether the plan is the arm that was drawn."""
    if decision.get("explore") and not run.admitted.get("explore", True):
        return "the request forbids to explore"
    _, *workers = str(decision["action"]).split(" ")
    if decision["action"] != MODEL and [step.plan.body["worker"] for step in proposal.steps] != workers:
        return f"the plan is not {decision['action'][:80]}"
    outside = {name for arm in decision["candidates"] for name in arm.split(" ")[1:]} - set(run.admitted["pool"])
    return f"an arm has a worker outside the pool: {sorted(outside)[0]}" if outside else ""
