"""The explanation of a run as data: why it was planned so, why these workers did its steps, and what nobody knows.

Everything comes from the journal, the ratings, the pool's snapshot and, where the reader may read content, from the
reasons that a conductor gave. `explanation_words.py` puts this data into sentences and adds nothing to it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from app.core.plan.workflow import CONDUCTOR
from app.core.pool.catalog import MILLION, Worker
from app.core.pool.snapshot import restored
from app.core.rating.economics import CHEAPEST, compared
from app.core.records import record
from app.core.run.approvals import NOT_APPROVED
from app.core.run.caller_view import dollars
from app.core.run.events import (
    Event,
    PlanAccepted,
    PlanOpened,
    PlanStep,
    RunApprovalExpired,
    RunApproved,
    RunAwaitingApproval,
    RunRefused,
    facts,
)
from app.core.run.state import Proposal, RunState, StepState, fold
from app.core.run.withheld import decided_by, withheld
from app.gateway.runs import audit, explanation_words
from app.store.protocol import Journal, Reports, RunRow, TenantStore

Data = dict[str, Any]
EXCLUDED_BY: Final = (
    ("not cleared for", "clearance"),
    ("excluded by the rule", "rule"),
    ("another worker is pinned", "caller"),
    ("not in the request's allow list", "caller"),
    ("in the request's deny list", "caller"),
    ("ejected", "health"),
    ("its price is not known", "budget"),
    ("over_budget", "budget"),
    (NOT_APPROVED, "approval"),
)
"""Beginnings of the reasons for which a worker is left out, each with who or what decided so. Other reasons are its
abilities, or its failures where it is passed over for a call."""
DIGITS: Final = 6
"""Decimal places of probabilities and scores, in the data as in the words."""
MOST_ALTERNATIVES: Final = 8
"""The most alternatives of a selector that are shown."""


async def explain(store: TenantStore, catalogs: Reports, row: RunRow, *, content: bool) -> Data:
    """The explanation of a run, with its words under `text`.

    Without `content` the reasons of conductors, which may repeat what the caller said, are left out, and their state is
    `not_shown`.
    """
    journal, given = await store.journal(row.id), await store.feedback(row.id)
    state = fold(journal.events)
    whole = audit.whole(row, journal, given, state)
    return await explain_read(store, catalogs, row, journal, state, whole, content=content)


async def explain_read(
    store: TenantStore,
    catalogs: Reports,
    row: RunRow,
    journal: Journal,
    state: RunState,
    whole: Data,
    *,
    content: bool,
) -> Data:
    """`explain` of a run whose journal was read already. `state` is the fold of it, and `whole` the run as
    `GET /v1/runs/{id}` shows it."""
    refs = _refs(journal.events)
    shelf = await store.contents(row.id, sorted(refs)) if content and refs else {}
    texts = {ref: body.decode("utf-8", "replace") for ref, body in shelf.items()}
    digest = str(journal.events[0].body.get("catalog", ""))
    snapshots = await catalogs.catalogs([digest]) if digest else {}
    return explained(row, journal, state, whole, _workers(snapshots.get(digest)), texts if content else None)


def explained(
    row: RunRow,
    journal: Journal,
    state: RunState,
    whole: Data,
    pool: Mapping[str, Worker] | None = None,
    texts: Mapping[str, str] | None = None,
) -> Data:
    """The explanation from what was read. `pool` are the workers of the pool's snapshot, None if there is none that can
    be read; `texts` are the reasons by their refs, None if the reader may not read them."""
    known = _ExplainedRun(
        row=row,
        state=state,
        events=journal.events,
        whole=whole,
        pool=pool or {},
        texts=texts,
        steps=state.planned,
        plan_steps={fact.n: fact for fact in facts(journal.events, PlanStep)},
        openings={fact.proposal: fact for fact in facts(journal.events, PlanOpened)},
    )
    data = {
        "object": "run.explanation",
        "run": row.id,
        "state": row.state,
        "tier": row.tier,
        "served_by": known.whole["served_by"],
        "preview": known.state.admitted.preview,
        "rehearsal": known.state.admitted.rehearsal,
        "erased": known.whole["erased"],
        "origin": known.whole["origin"],
        "shape": _shape(known),
        "pool": _pool(known),
        "excluded": _excluded(known),
        "approvals": [_approval(known, fact) for fact in facts(known.events, RunAwaitingApproval)],
        "steps": _steps(known),
        "cost": _cost(known),
        "answer": _answer(known),
    }
    data["unknown"] = _unknown(data)
    data["text"] = explanation_words.text(data)
    return data


@record(frozen=True, slots=True)
class _ExplainedRun:
    """All that is known of one run."""

    row: RunRow
    state: RunState
    events: Sequence[Event]
    whole: Data
    """The run as `GET /v1/runs/{id}` shows it."""
    pool: Mapping[str, Worker]
    texts: Mapping[str, str] | None
    steps: Sequence[StepState]
    """The steps of the workflows of all rounds, and of what is nested in them."""
    plan_steps: Mapping[int, PlanStep]
    """The steps as they were planned, by their numbers."""
    openings: Mapping[int, PlanOpened]
    """The openings of the proposals, by their numbers."""

    def reason(self, ref: str, *, asked: bool) -> Data:
        """A reason with its state: `given`, `none` (asked for, and not given), `not_asked`, `erased`, `not_shown`."""
        if not ref:
            return {"state": "none" if asked else "not_asked", "text": None}
        if self.texts is None:
            return {"state": "not_shown", "text": None}
        found = self.texts.get(ref)
        return {"state": "erased" if found is None else "given", "text": found}


def _refs(events: Sequence[Event]) -> set[str]:
    refs = {fact.why for fact in facts(events, PlanAccepted)}
    for fact in facts(events, PlanStep):
        refs |= {fact.why, fact.why_withheld}
    refs |= {fact.reason for fact in facts(events, RunApproved)}
    refs |= {fact.reason for fact in facts(events, RunRefused)}
    return refs - {""}


def _workers(snapshot: bytes | None) -> Mapping[str, Worker] | None:
    """The workers of a pool's snapshot; None if there is none that this version can read."""
    try:
        if snapshot is None:
            return None
        return restored(snapshot).workers
    except (ValueError, TypeError, KeyError):
        return None


# -- the shape


def _shape(known: _ExplainedRun) -> Data:
    """The reasons for the run's topology: who proposed it, what was rejected before, and what else there was to
    choose."""
    made = known.state.all_proposals
    shown: Data = {
        "topology": known.state.topology or None,
        "rounds": known.state.rounds,
        "step_count": len(known.steps),
        "decided_by": None,
        "conductor": None,
        "version": None,
        "reason": known.reason("", asked=False),
        "choice": _choice(known),
        "proposals": [_proposal(proposal) for proposal in made],
        "rejected": sum(proposal.state == "rejected" for proposal in made),
    }
    kept = next((proposal for proposal in reversed(known.state.proposals) if proposal.topology), known.state.proposal)
    if kept is None:
        return shown
    shown["decided_by"] = decided_by(kept, known.events)
    reasons = {fact.proposal: fact.why for fact in facts(known.events, PlanAccepted)}
    opened = known.openings.get(kept.number)
    asked = opened.reasons if opened is not None else False
    shown["reason"] = known.reason(reasons.get(kept.number, ""), asked=asked)
    attempts = next(proposal["attempts"] for proposal in known.whole["proposals"] if proposal["number"] == kept.number)
    if attempts:
        shown |= {"conductor": attempts[0]["worker"], "version": attempts[0]["version"]}
    return shown


def _proposal(proposal: Proposal) -> Data:
    return {
        "number": proposal.number,
        "round": proposal.round,
        "parent": proposal.parent,
        "mode": proposal.mode,
        "state": proposal.state,
        "outage": proposal.outage,
        "topology": proposal.topology or None,
        "rejected_because": list(proposal.reasons),
    }


def _choice(known: _ExplainedRun) -> Data | None:
    """The choice of a selector with its likeliest alternatives, or None."""
    opened = [fact.decision for fact in facts(known.events, PlanOpened) if fact.decision]
    if not opened:
        return None
    decision = opened[-1]
    candidates: Mapping[str, float] = decision["candidates"]
    predicted: Mapping[str, Any] = decision.get("predicted", {})
    order = sorted(candidates, key=lambda name: (name != decision["action"], -candidates[name], name))
    return {
        "action": decision["action"],
        "probability": round(decision["propensity"], DIGITS),
        "explored": decision["explored"],
        "explores": bool(decision["explore"]),
        "version": decision["version"],
        "candidates": len(candidates),
        "alternatives": [_alternative(name, candidates[name], predicted.get(name)) for name in order][
            : MOST_ALTERNATIVES + 1
        ],
        "left_out": [{"action": name, **price} for name, price in decision.get("masked", {}).items()],
    }


def _alternative(name: str, probability: float, predicted: Mapping[str, float] | None) -> Data:
    shown: Data = {"action": name, "probability": round(probability, DIGITS), "success": None, "cost_usd": None}
    if predicted is not None:
        shown |= {"success": predicted["success"], "cost_usd": dollars(int(predicted["usd"]))}
    return shown


# -- the workers


def _pool(known: _ExplainedRun) -> list[Data]:
    """The workers that could be chosen, as their cards were at the admission, with the steps that each of them did."""
    rows = []
    for name in known.state.admitted.pool:
        worker = known.pool.get(name)
        row: Data = {"worker": name, "strengths": [], "input_usd": None, "output_usd": None}
        if worker is not None:
            row["strengths"] = list(worker.card.strengths)
        if worker is not None and worker.priced:
            row |= {"input_usd": worker.price.input / MILLION, "output_usd": worker.price.output / MILLION}
        row["steps"] = [step.n for step in known.steps if step.worker == name and step.state == "done"]
        rows.append(row)
    return rows


def _excluded(known: _ExplainedRun) -> list[Data]:
    """The workers that could not be chosen, each with the reason and with who decided so."""
    rows = [_left_out(name, reason, None) for name, reason in known.state.admitted.excluded.items()]
    for fact in facts(known.events, PlanOpened):
        for name, reason in (fact.ejected or {}).items():
            rows.append(_left_out(name, f"ejected: {reason}", fact.proposal))
    return rows


def _left_out(worker: str, reason: str, proposal: int | None, otherwise: str = "ability") -> Data:
    by = next((by for beginning, by in EXCLUDED_BY if reason.startswith(beginning)), otherwise)
    return {"worker": worker, "reason": reason, "by": by, "proposal": proposal}


def _approval(known: _ExplainedRun, asked: RunAwaitingApproval) -> Data:
    """A plan that needed an approval: why, and who decided what. There is no decision while it waits."""
    approved = next((fact for fact in facts(known.events, RunApproved) if fact.digest == asked.digest), None)
    refused = next((fact for fact in facts(known.events, RunRefused) if fact.digest == asked.digest), None)
    expired = any(fact.proposal == asked.proposal for fact in facts(known.events, RunApprovalExpired))
    decided = approved or refused
    decision = "expired" if expired else None
    if decided is not None:
        decision = "approved" if approved is not None else "refused"
    return {
        "proposal": asked.proposal,
        "needed_because": list(asked.reasons),
        "worst_case_usd": dollars(asked.price) if asked.price is not None else None,
        "decision": decision,
        "by": decided.by if decided is not None else None,
        "max_usd": dollars(approved.max_usd) if approved is not None else None,
        "reason": known.reason(decided.reason if decided is not None else "", asked=True),
    }


# -- the steps


def _steps(known: _ExplainedRun) -> list[Data]:
    shown = {step["n"]: step for step in known.whole["steps"]}
    return [_step(known, step, shown[step.n]) for step in known.steps]


def _step(known: _ExplainedRun, step: StepState, shown: Data) -> Data:
    planned = known.plan_steps[step.n]
    proposal = next(proposal for proposal in known.state.all_proposals if proposal.number == step.proposal)
    opened = known.openings.get(step.proposal)
    asked = opened.reasons if opened is not None else False
    by = decided_by(proposal, known.events)
    return {
        "n": step.n,
        "round": proposal.round,
        "parent": proposal.parent,
        "state": step.state,
        "error": step.error or None,
        "worker": step.worker,
        "planned_worker": planned.worker,
        "chosen_by": by,
        "nested": step.worker == CONDUCTOR,
        "probability": planned.probability,
        "reason": known.reason(planned.why, asked=asked),
        "saw": _saw(known, step),
        "withheld": _withheld(known, step, by) | {"reason": known.reason(planned.why_withheld, asked=asked)},
        "calls": [_call(attempt) for attempt in shown["attempts"]],
        "call_count": len(shown["attempts"]),
        "failed_calls": sum(attempt["outcome"] not in ("ok", None) for attempt in shown["attempts"]),
        "replaced": step.worker != planned.worker,
        "not_called": _not_called(shown),
        "cost_usd": shown["cost_usd"],
    }


def _saw(known: _ExplainedRun, step: StepState) -> Data:
    """The sources of the messages of the step's worker, besides its subtask."""
    return {
        "user": step.access.user,
        "steps": list(step.access.steps),
        "tool_results": sum(bool(exchange.results) for exchange in step.exchanges),
    }


def _withheld(known: _ExplainedRun, step: StepState, by: str) -> Data:
    proposal = next(proposal for proposal in known.state.all_proposals if proposal.number == step.proposal)
    kept = withheld(
        known.state, step, proposal, by, [planned for planned in known.steps if planned.proposal == step.proposal]
    )
    return {"user": kept.user, "steps": list(kept.steps), "by": kept.by or None}


def _call(attempt: Mapping[str, Any]) -> Data:
    names = ("worker", "outcome", "error", "reason", "cost_usd", "seconds", "despite")
    return {name: attempt.get(name) for name in names}


def _not_called(step: Mapping[str, Any]) -> list[Data]:
    """The workers that were passed over for any of a step's calls, each once for each reason."""
    lists = [*(call["passed_over"] for call in step["attempts"]), step["passed_over"]]
    found: dict[tuple[str, str], Data] = {}
    for left_out in [entry for entries in lists for entry in entries]:
        found[left_out["worker"], left_out["reason"]] = _left_out(
            left_out["worker"], left_out["reason"], None, "health"
        )
    return list(found.values())


# -- money, and what speaks for the answer


def _cost(known: _ExplainedRun) -> Data:
    """The cost of the run, and that of its steps with the cheapest worker, as reports compute it."""
    prices = {name: worker.price for name, worker in known.pool.items() if worker.priced}
    calls = list(known.state.calls.values())
    planning = sum(call.usd for call in calls if call.step is None)
    shown: Data = {
        "cost_usd": dollars(known.state.usd),
        "planning_usd": dollars(planning),
        "steps_usd": dollars(known.state.usd - planning),
        "call_count": len(calls),
        "estimated": any(call.usage.estimated for call in calls),
        "unknown_calls": sum(call.outcome == "unknown" for call in calls),
        "cheapest_worker": None,
        "cheapest_usd": None,
        "difference_usd": None,
        "dearer": None,
        "method": CHEAPEST,
    }
    least = compared(known.state.admitted.pool, known.events, prices)
    if least is not None:
        shown |= {"cheapest_worker": least.worker, "cheapest_usd": dollars(least.least)}
        shown |= {"difference_usd": dollars(abs(least.usd - least.least)), "dearer": least.usd > least.least}
    return shown


def _answer(known: _ExplainedRun) -> Data:
    """The facts that speak for the answer: how it ended, which steps it rests on, which of them agree, and its
    ratings."""
    state, end = known.state, known.state.end
    accepted = [
        proposal.round
        for proposal in state.proposals
        if proposal.state == "accepted" and proposal.round > 1 and not proposal.topology
    ]
    shown: Data = {
        "step": None,
        "worker": None,
        "finish": None,
        "refusal": False,
        "rests_on": [],
        "same_text": [],
        "other_answers": [],
        "accepted_in_round": accepted[-1] if accepted else None,
        "form_repairs": _repairs(known),
        "fell_back": False,
        "stopped": None,
        "degraded": state.degraded,
        "error": None,
        "ratings": [_rating(rating) for kind in known.whole["feedback"].values() for rating in kind],
    }
    if end is not None:
        shown |= {"fell_back": end.fell_back, "stopped": end.stopped or None, "error": end.error or None}
    if end is not None and end.step is not None:
        step = state.steps[end.step]
        shown |= {"step": step.n, "worker": step.worker, "finish": step.finish, "refusal": step.refusal}
        shown |= {"rests_on": list(step.access.steps), "same_text": _same_text(known, step)}
        shown["other_answers"] = _others(known, step)
    return shown


def _rating(rating: Data) -> Data:
    score = round(rating["score"], DIGITS) if rating["score"] is not None else None
    return {"kind": rating["kind"], "source": rating["source"], "score": score, "label": rating["label"]}


def _others(known: _ExplainedRun, answer: StepState) -> list[int]:
    """The steps with an output of their own, besides the answering one."""
    return [step.n for step in known.steps if step.n != answer.n and step.chars and step.worker != CONDUCTOR]


def _same_text(known: _ExplainedRun, answer: StepState) -> list[int]:
    """The other steps whose output is the same text. One salt is used for all texts of a run, so equal refs are equal
    texts."""
    return [n for n in _others(known, answer) if answer.output and known.state.steps[n].output == answer.output]


def _repairs(known: _ExplainedRun) -> int:
    """The number of times that a worker was asked again because its answer did not match the requested format."""
    return sum(event.kind.value == "call.intended" and bool(event.body.get("repairs")) for event in known.events)


# -- what nobody knows


def _unknown(data: Data) -> list[Data]:
    """The gaps of the explanation, each with its cause."""
    found = [_gap("shape", None, data["shape"]["reason"]["state"])] if _has_reasons(data["shape"]["decided_by"]) else []
    for step in data["steps"]:
        if not _has_reasons(step["chosen_by"]):
            continue
        if step["reason"]["state"] not in ("given", "not_asked"):
            found.append(_gap("worker", step["n"], step["reason"]["state"]))
        if step["probability"] is None:
            found.append(_gap("probability", step["n"], "not_reported"))
    choice = data["shape"]["choice"]
    if choice is not None and any(alternative["success"] is None for alternative in choice["alternatives"]):
        found.append(_gap("prediction", None, "not_journaled"))
    return [question for question in [*found, *_open_questions(data)] if question["cause"] != "given"]


def _open_questions(data: Data) -> list[Data]:
    found = []
    if data["cost"]["call_count"] and data["cost"]["cheapest_usd"] is None:
        found.append(_gap("cheapest", None, "no_prices"))
    if data["cost"]["unknown_calls"]:
        found.append(_gap("cost", None, "outcome_lost"))
    if data["cost"]["estimated"]:
        found.append(_gap("cost", None, "usage_estimated"))
    if data["answer"]["step"] is not None and not data["answer"]["ratings"]:
        found.append(_gap("quality", None, "not_rated"))
    if data["answer"]["other_answers"]:
        found.append(_gap("agreement", None, "not_compared"))
    if any(step["calls"] for step in data["steps"]):
        found.append(_gap("workers_reasons", None, "not_observable"))
    return found


def _has_reasons(by: str | None) -> bool:
    return by == "conductor"


def _gap(about: str, step: int | None, cause: str) -> Data:
    return {"about": about, "step": step, "cause": cause}
