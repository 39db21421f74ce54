"""Judges of what approvals and pool files promise, from the journal, from what workers received, and from what those
who decide were told."""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.simulation.case import OTHERS, Case
from tests.simulation.loop import EPOCH
from tests.simulation.operators import catalogs_by_digest
from tests.simulation.witness import ENDINGS, Fact

CLOCK_ERROR = 20.0
"""Seconds by which a process's clock may be wrong that was frozen while it read the database's for the first time."""
ASKED, APPROVED, REFUSED, DROPPED = "run.awaiting_approval", "run.approved", "run.refused", "run.approval_expired"
NOBODY_DECIDED = "approval_expired"
"""The error of a run on whose plan nobody has decided in time."""
NOBODY_CAME_BACK = "tool_results_missing"
"""The error of a run that called its caller's tools in vain: the caller heard that its plan waits, and went away."""


def no_step_begins_unapproved(case: Case) -> Iterator[str]:
    """A step of a plan that needs an approval begins after the approval of exactly that plan. Which plans need one is
    said here once more: all where the request asks for it, and those that name a worker, or cost more, than the tier
    allows unasked."""
    terms = case.facts[0].body.get("approval")
    if not terms:
        return
    proposals = {body["n"]: body["proposal"] for body in case.bodies("plan.step")}
    needed = {
        fact.body["proposal"] for fact in case.facts if fact.kind == "plan.accepted" and _needs(case, terms, fact)
    }
    asked: dict[str, int] = {}
    for fact in case.facts:
        body = fact.body
        begins = fact.kind in ("step.queued", "call.intended") and body["n"] is not None
        if fact.kind == ASKED:
            asked[body["digest"]] = body["proposal"]
        elif fact.kind == APPROVED and asked.get(body["digest"]) != body["proposal"]:
            yield f"plan {body['proposal']} was approved under a digest that was not its own"
        elif fact.kind == APPROVED:
            needed -= {body["proposal"]}
        elif begins and proposals[body["n"]] in needed:
            yield f"step {body['n']} began without an approval of its plan"


def _needs(case: Case, terms: Mapping[str, Any], accepted: Fact) -> bool:
    """Return True if the terms alone want an approval of a plan, whatever the run has asked for before."""
    workers = {body["worker"] for body in case.bodies("plan.step") if body["proposal"] == accepted.body["proposal"]}
    ended = [fact for fact in case.facts if fact.kind == "call.finished" and fact.seq < accepted.seq]
    dear = terms["above_usd"] is not None and (
        sum(fact.body["usd"] for fact in ended) + accepted.body["price"] > terms["above_usd"]
    )
    return bool(workers) and (bool(terms["reasons"]) or bool(workers & set(terms["workers"])) or dear)


def approved_workers_are_called_as_they_were_shown(case: Case) -> Iterator[str]:
    """Under an approval only workers are called that it names, and only as the pool file had them that was shown."""
    steps = {body["n"]: body["proposal"] for body in case.bodies("plan.step")}
    shown: dict[int, dict[str, Any]] = {body["proposal"]: body for body in case.bodies(ASKED)}
    allowed = {body["proposal"]: body["workers"] for body in case.bodies(APPROVED)}
    planned = {body["request"]: body["n"] for body in case.bodies("call.intended")}
    for call in case.received:
        n = planned[call.request]
        if n is None or steps[n] not in allowed:
            continue
        worker = catalogs_by_digest()[shown[steps[n]]["catalog"]].workers.get(call.worker.name)
        if call.worker.name not in allowed[steps[n]]:
            yield f"step {n} called {call.worker.name}, whom the approval does not name"
        elif worker is None or (worker.model, worker.price) != (call.worker.model, call.worker.price):
            yield f"step {n} called {call.worker.name} as another one than was shown"


def an_approved_price_is_kept(case: Case) -> Iterator[str]:
    """After an approval no step is begun for which the run could spend more than was allowed."""
    spent, allowed = 0, None
    for fact in case.facts:
        if fact.kind == "call.finished":
            spent += fact.body["usd"]
        elif fact.kind == APPROVED:
            allowed = fact.body["max_usd"]
        elif fact.kind == "call.intended" and fact.body["n"] is not None:
            most = spent + fact.body["usd_held"]
            if allowed is not None and most > allowed:
                yield f"event {fact.seq} may spend {most} in all, {allowed} were allowed"


def a_decision_is_kept(case: Case) -> Iterator[str]:
    """Whoever was told that their decision holds finds it in the journal, for the plan that they meant, and there is
    one on each question at most."""
    decided = [(fact.body["digest"], fact.kind) for fact in case.facts if fact.kind in (APPROVED, REFUSED)]
    if len({digest for digest, _ in decided}) < len(decided):
        yield f"a question was decided more than once: {decided}"
    for request in case.world.decisions:
        kind = APPROVED if request.verdict == "approve" else REFUSED
        if request.run == case.run and request.accepted and (request.digest, kind) not in decided:
            yield f"{request.by} was told that the plan {request.digest[:8]} is {kind}, and it is not"


def a_refusal_ends_the_run(case: Case) -> Iterator[str]:
    """In the same moment, and no step of the refused plan was ever called."""
    for place, fact in enumerate(case.facts):
        if fact.kind == REFUSED:
            ends = [later for later in case.facts[place:] if later.kind in ENDINGS and later.at == fact.at]
            if len(ends) != 1:
                yield f"event {fact.seq} refuses its plan, and {len(ends)} ends came with it"


def nothing_happens_while_it_waits(case: Case) -> Iterator[str]:
    """While a plan waits for an approval nobody drives the run; only the wish that it ends is taken."""
    waits = False
    for fact in case.facts:
        if waits and fact.kind not in (APPROVED, REFUSED, DROPPED, "run.cancel_asked", "step.skipped", *ENDINGS):
            yield f"event {fact.seq}, {fact.kind}, came while the plan waited for an approval"
        if fact.kind in (ASKED, APPROVED, REFUSED, DROPPED):
            waits = fact.kind == ASKED


def a_wait_for_an_approval_ends(case: Case) -> Iterator[str]:
    """A plan on which nobody decides is dropped, or ends its run, soon after its time and not before."""
    if any(site.startswith("process.clock") for site in case.world.faults.hits):
        return
    asked: Fact | None = None
    for fact in case.facts:
        is_dropped = fact.kind == DROPPED or (fact.kind in ENDINGS and fact.body.get("error") == NOBODY_DECIDED)
        if is_dropped and asked is not None:
            until = asked.body["until"] - EPOCH
            late = fact.at - max(until, case.broken_until)
            if fact.at < until - (1.0 if case.only(*OTHERS) else CLOCK_ERROR) or late > case.patience:
                yield f"its plan could be approved until {until:.1f} s, and was dropped at {fact.at:.1f} s"
        if fact.kind in (ASKED, APPROVED, REFUSED, DROPPED):
            asked = fact if fact.kind == ASKED else None


def an_approved_plan_is_carried_out(case: Case) -> Iterator[str]:
    """Where nothing else happens than that plans are approved, every run succeeds, unless the approved price is too
    little: it has one call of each step in it, and neither a call for a nested plan nor one after tool results."""
    if case.only("caller.needs_approval") and not case.bodies(DROPPED) and case.end is not None:
        is_left = case.end.body.get("error") in (NOBODY_DECIDED, NOBODY_CAME_BACK)
        if case.row["state"] not in ("succeeded", "over_budget") and not is_left:
            yield f"all that happened is that its plans were approved, and it is {case.row['state']}"


def the_receiver_is_asked(case: Case) -> Iterator[str]:
    """Each plan that waits for an approval is told to the operator's receiver."""
    if not case.world.setting.notifies:
        return
    told = {delivery.about for delivery in case.world.receiver.deliveries if delivery.is_accepted}
    for body in case.bodies(ASKED):
        if body["digest"] not in told:
            yield f"nobody was told that plan {body['proposal']} waits for an approval"


def limits_are_those_of_the_pool_file(case: Case) -> Iterator[str]:
    """A run has at most the limits of its tier, and only workers of it, in the pool file that its admission names."""
    admitted = case.facts[0].body
    catalog = catalogs_by_digest()[admitted["catalog"]]
    tier = catalog.tiers.get(admitted["tier"])
    if tier is None:
        yield f"it was admitted under the tier {admitted['tier']}, which its pool file lacks"
        return
    limits = tier.efforts[admitted["effort"]]
    wider = [name for name, value in admitted["limits"].items() if value > getattr(limits, name)]
    if wider:
        yield f"its {wider} are beyond those of its tier"
    if not set(admitted["pool"]) <= set(tier.pool):
        yield f"its pool {admitted['pool']} is not that of its tier"


CHECKS = (
    no_step_begins_unapproved,
    approved_workers_are_called_as_they_were_shown,
    an_approved_price_is_kept,
    a_decision_is_kept,
    a_refusal_ends_the_run,
    nothing_happens_while_it_waits,
    a_wait_for_an_approval_ends,
    an_approved_plan_is_carried_out,
    the_receiver_is_asked,
    limits_are_those_of_the_pool_file,
)
