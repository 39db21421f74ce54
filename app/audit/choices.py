"""Rules about a selector's decision: its probabilities add up, the plan is the arm that was drawn, and the arms that
were left out before the draw could not be paid."""

from collections.abc import Iterator, Mapping
from typing import Any

from app.audit.audited_run import AuditedRun, Proposal
from app.audit.report import Violation
from app.core.pool.catalog import MILLION, Catalog
from app.core.run.kinds import Kind

SELECTOR, MODEL = "selector", "model"
ROUNDING_ERROR = 1e-9
"""The error that rounding may leave in a sum of probabilities."""


def check_decision(run: AuditedRun, proposal: Proposal) -> Iterator[Violation]:
    """Each first proposal of a selector has a decision, and no other proposal has one."""
    body, seq = proposal.opening.body, proposal.opening.seq
    decision = body.get("decision")
    if (decision is not None) != (body["conductor"] == SELECTOR and body["mode"] == "first"):
        yield run.violation("decision-missing", seq, "a decision where none is made, or none where one is")
    if decision is None:
        return
    if not isinstance(decision, dict):
        yield run.violation("decision-wrong", seq, "the decision is not an object")
    elif fault := _fault_of_decision(decision):
        yield run.violation("decision-wrong", seq, fault)
    elif fault := _fault_of_plan(run, proposal, decision):
        yield run.violation("decision-unfollowed", seq, fault)
    elif fault := _fault_of_mask(run, proposal, decision):
        yield run.violation("mask-wrong", seq, fault)


def _fault_of_decision(decision: Mapping[str, Any]) -> str:
    """Return the fault of a decision, regardless of the run; empty if it has none."""
    texts = ("layer", "policy", "version", "features", "action", "seed")
    candidates, propensity = decision.get("candidates"), decision.get("propensity")
    if any(not isinstance(decision.get(name), str) for name in texts) or not isinstance(candidates, dict):
        return "the decision lacks a field"
    if any(not isinstance(candidate, float) or not 0 <= candidate <= 1 for candidate in candidates.values()):
        return "a candidate's probability is not valid"
    if abs(sum(candidates.values()) - 1) > ROUNDING_ERROR:
        return f"the probabilities add up to {sum(candidates.values()):.6f}"
    if not propensity or candidates.get(decision["action"]) != propensity:
        return "the propensity is not the probability of the action"
    if not decision.get("explore") and propensity != 1:
        return "a choice that must not explore was drawn at random"
    return _fault_of_predictions(decision.get("predicted", {}), candidates)


def _fault_of_predictions(predicted: object, candidates: Mapping[str, Any]) -> str:
    """Return the fault of the predictions; empty if they have none. Journals of older releases have no predictions."""
    if not isinstance(predicted, dict):
        return "the predictions are not an object"
    for arm, estimate in predicted.items():
        if arm not in candidates or not isinstance(estimate, dict) or not 0 <= estimate.get("success", -1) <= 1:
            return f"the prediction for {arm[:80]} is not valid"
    return ""


def _fault_of_plan(run: AuditedRun, proposal: Proposal, decision: Mapping[str, Any]) -> str:
    """Return the fault of a decision that the request forbids, or that the plan does not follow; empty if none."""
    if decision.get("explore") and not run.admission.get("explore", True):
        return "the request forbids to explore"
    _, *workers = str(decision["action"]).split(" ")
    if decision["action"] != MODEL and [step.plan.body["worker"] for step in proposal.steps] != workers:
        return f"the plan is not {decision['action'][:80]}"
    pool = set(run.admission["pool"])
    for arm in decision["candidates"]:
        if outside := sorted(set(arm.split(" ")[1:]) - pool):
            return f"an arm has a worker outside the pool: {outside[0]}"
    return ""


def _fault_of_mask(run: AuditedRun, proposal: Proposal, decision: Mapping[str, Any]) -> str:
    """Return the fault of the arms that were left out before the draw; empty if there is none."""
    masked, remaining = decision.get("masked", {}), decision.get("left", {})
    if not isinstance(masked, dict) or not isinstance(remaining, dict):
        return "the arms that were left out are not an object"
    if not masked:
        return ""
    spent = sum(event.body["usd"] for event in run.events_of(Kind.CALL_FINISHED) if event.seq < proposal.opening.seq)
    if remaining.get("usd") != max(run.limits["usd"] - spent, 0):
        return f"{remaining.get('usd')} micro-dollars are said to be left, {run.limits['usd'] - spent} were"
    for arm, price in masked.items():
        if arm in decision["candidates"]:
            return f"{arm[:80]} is left out, and a candidate"
        if not isinstance(price, dict) or not any(price[name] > remaining.get(name, price[name]) for name in price):
            return f"{arm[:80]} is left out although it could be paid"
    return ""


def check_masked_prices(run: AuditedRun, catalog: Catalog) -> Iterator[Violation]:
    """Each arm that stood to be drawn could be paid, as far as its output at the floor of the tier goes, and each that
    was left out for its price costs at least as much. Where no arm could be paid, one remains."""
    floor = min(run.limits["floor_tokens"], run.limits["output_tokens"])
    for proposal in run.proposals:
        decision = proposal.opening.body.get("decision")
        if not isinstance(decision, dict) or _fault_of_mask(run, proposal, decision):
            continue  # the latter is reported elsewhere
        if not decision.get("masked"):
            continue
        remaining, candidates = decision["left"]["usd"], decision["candidates"]
        mispriced: list[str] = []
        if len(candidates) > 1:
            mispriced += [arm for arm in candidates if _output_price(arm, catalog, floor) > remaining]
        for arm, price in decision["masked"].items():
            if "usd" in price and price["usd"] < _output_price(arm, catalog, floor):
                mispriced.append(arm)
        for arm in mispriced:
            yield run.violation("mask-wrong", proposal.opening.seq, f"{arm[:80]} has another price than its workers'")


def _output_price(arm: str, catalog: Catalog, floor: int) -> float:
    """Return the micro-dollars of an arm's outputs at the floor, without its inputs."""
    workers = [catalog.workers[name] for name in arm.split(" ")[1:] if name in catalog.workers]
    return sum(worker.price.output * min(floor, worker.card.max_output) for worker in workers) / MILLION
