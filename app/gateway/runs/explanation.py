"""The explanation of a run as data: why it was planned so, why these workers did its steps, and what nobody knows.

Everything comes from the journal, the ratings, the pool's snapshot and, where the reader may read content, from the
reasons that a conductor gave. `explanation_words.py` puts this data into sentences and adds nothing to it.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

from msgspec import Struct

from app.core.plan.workflow import CONDUCTOR
from app.core.pool.catalog import MILLION, Worker
from app.core.pool.policy import EJECTED, decided_by
from app.core.pool.snapshot import restore_catalog
from app.core.rating.economics import CHEAPEST_METHOD, compare_with_cheapest
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
    StepDone,
    facts,
)
from app.core.run.fold import fold
from app.core.run.state import Proposal, RunState, StepState
from app.core.run.visibility import steps_without_output
from app.core.run.withheld import find_decider, find_withheld
from app.gateway.runs import audit, explanation_words
from app.store.protocol import Journal, Reports, RunRow, TenantStore

Data = dict[str, Any]
DIGITS: Final = 6
"""Decimal places of probabilities and scores, in the data as in the words."""
MOST_ALTERNATIVES: Final = 8
"""The most alternatives of a selector that are shown."""


async def explain(store: TenantStore, catalogs: Reports, row: RunRow, *, content: bool) -> Data:
    """Return the explanation of a run, with its words under `text`.

    Without `content` the reasons of conductors, which may repeat what the caller said, are left out, and their state is
    `not_shown`.
    """
    journal, feedback = await store.journal(row.id), await store.feedback(row.id)
    state = fold(journal.events)
    whole = audit.render_run(row, journal, feedback, state)
    return await explain_read(store, catalogs, ReadRun(row, journal, state, whole), content=content)


class ReadRun(Struct, frozen=True):
    """A run as it was read from the store."""

    row: RunRow
    journal: Journal
    state: RunState
    """The fold of the journal."""
    whole: Data
    """The run as `GET /v1/runs/{id}` shows it."""


async def explain_read(store: TenantStore, catalogs: Reports, run: ReadRun, *, content: bool) -> Data:
    """Return the explanation of a run that was read already."""
    events = run.journal.events
    texts = None
    if content:
        texts = await _read_reasons(store, run.row.id, events)
    digest = str(events[0].body.get("catalog", ""))
    snapshots: Mapping[str, bytes] = {}
    if digest:
        snapshots = await catalogs.catalogs([digest])
    return explanation_of(run, _workers(snapshots.get(digest)), texts)


async def _read_reasons(store: TenantStore, run: str, events: Sequence[Event]) -> dict[str, str]:
    """Read the reasons that a run's events refer to. Those that were erased are missing."""
    refs = _refs(events)
    if not refs:
        return {}
    contents = await store.contents(run, sorted(refs))
    return {ref: body.decode("utf-8", "replace") for ref, body in contents.items()}


def explanation_of(
    read_run: ReadRun, pool: Mapping[str, Worker] | None = None, texts: Mapping[str, str] | None = None
) -> Data:
    """Return the explanation from what was read. `pool` are the workers of the pool's snapshot, None if there is none
    that can be read; `texts` are the reasons by their refs, None if the reader may not read them."""
    row, state, events = read_run.row, read_run.state, read_run.journal.events
    run = _ExplainedRun(
        state=state,
        events=events,
        whole=read_run.whole,
        pool=pool or {},
        texts=texts,
        steps=state.planned_steps,
        plan_steps={fact.n: fact for fact in facts(events, PlanStep)},
        openings={fact.proposal: fact for fact in facts(events, PlanOpened)},
    )
    data = {
        "object": "run.explanation",
        "run": row.id,
        "state": row.state,
        "tier": row.tier,
        "served_by": run.whole["served_by"],
        "preview": state.admitted.preview,
        "rehearsal": state.admitted.rehearsal,
        "erased": run.whole["erased"],
        "origin": run.whole["origin"],
        "shape": _shape(run),
        "pool": _pool(run),
        "excluded": _list_excluded(run),
        "approvals": [_approval(run, fact) for fact in facts(run.events, RunAwaitingApproval)],
        "steps": _steps(run),
        "cost": _cost(run),
        "answer": _answer(run),
    }
    data["unknown"] = _list_gaps(data)
    data["text"] = explanation_words.text(data)
    return data


class _ExplainedRun(Struct, frozen=True):
    """The sources from which a run is explained."""

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
        """Return a reason with its state: `given`, `none` (asked for, and not given), `not_asked`, `erased`,
        `not_shown`."""
        if not ref and asked:
            return {"state": "none", "text": None}
        if not ref:
            return {"state": "not_asked", "text": None}
        if self.texts is None:
            return {"state": "not_shown", "text": None}
        if ref not in self.texts:
            return {"state": "erased", "text": None}
        return {"state": "given", "text": self.texts[ref]}

    def asks_reasons(self, proposal: int) -> bool:
        """Return True if the conductor of a proposal was asked for its reasons."""
        opened = self.openings.get(proposal)
        return opened is not None and opened.reasons


def _refs(events: Sequence[Event]) -> set[str]:
    refs = {fact.why for fact in facts(events, PlanAccepted)}
    for fact in facts(events, PlanStep):
        refs |= {fact.why, fact.why_withheld}
    refs |= {fact.reason for fact in facts(events, RunApproved)}
    refs |= {fact.reason for fact in facts(events, RunRefused)}
    return refs - {""}


def _workers(snapshot: bytes | None) -> Mapping[str, Worker] | None:
    """Return the workers of a pool's snapshot; None if there is none that this version can read."""
    try:
        if snapshot is None:
            return None
        return restore_catalog(snapshot).workers
    except ValueError:
        return None


# -- the shape


def _shape(run: _ExplainedRun) -> Data:
    """Return the reasons for the run's topology: who proposed it, what was rejected before, and what else there was to
    choose."""
    proposals, decisive = run.state.all_proposals, _decisive_proposal(run.state)
    shape: Data = {
        "topology": run.state.topology or None,
        "rounds": run.state.round_count,
        "step_count": len(run.steps),
        "decided_by": None,
        "conductor": None,
        "version": None,
        "reason": run.reason("", asked=False),
        "choice": _choice(run, decisive),
        "proposals": [_proposal(proposal) for proposal in proposals],
        "rejected": sum(proposal.state == "rejected" for proposal in proposals),
    }
    if decisive is None:
        return shape
    shape["decided_by"] = find_decider(decisive, run.events)
    reasons = {fact.proposal: fact.why for fact in facts(run.events, PlanAccepted)}
    asks_reasons = run.asks_reasons(decisive.number)
    shape["reason"] = run.reason(reasons.get(decisive.number, ""), asked=asks_reasons)
    for proposal in run.whole["proposals"]:
        if proposal["number"] == decisive.number and proposal["attempts"]:
            attempt = proposal["attempts"][0]
            shape |= {"conductor": attempt["worker"], "version": attempt["version"]}
    return shape


def _decisive_proposal(state: RunState) -> Proposal | None:
    """Return the last proposal with a topology, or the present one if none has one."""
    for proposal in reversed(state.proposals):
        if proposal.topology:
            return proposal
    return state.proposal


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


def _choice(run: _ExplainedRun, decisive: Proposal | None) -> Data | None:
    """Return the last choice of a selector that led to the decisive proposal, with its likeliest alternatives, or
    None."""
    decisions: dict[int, Mapping[str, Any]] = {}
    for number, opening in run.openings.items():
        if opening.decision and decisive is not None and number <= decisive.number:
            decisions[number] = opening.decision
    if not decisions:
        return None
    proposal, decision = list(decisions.items())[-1]
    candidates: Mapping[str, float] = decision["candidates"]
    predicted: Mapping[str, Any] = decision.get("predicted", {})
    order = sorted(candidates, key=lambda name: (name != decision["action"], -candidates[name], name))
    names = order[: MOST_ALTERNATIVES + 1]
    return {
        "proposal": proposal,
        "action": decision["action"],
        "probability": round(decision["propensity"], DIGITS),
        "explored": decision["explored"],
        "explores": bool(decision["explore"]),
        "version": decision["version"],
        "candidates": len(candidates),
        "alternatives": [_alternative(name, candidates[name], predicted.get(name)) for name in names],
        "left_out": [{"action": name, **price} for name, price in decision.get("masked", {}).items()],
    }


def _alternative(name: str, probability: float, predicted: Mapping[str, float] | None) -> Data:
    fields: Data = {"action": name, "probability": round(probability, DIGITS), "success": None, "cost_usd": None}
    if predicted is not None:
        fields |= {"success": predicted["success"], "cost_usd": dollars(int(predicted["usd"]))}
    return fields


# -- the workers


def _pool(run: _ExplainedRun) -> list[Data]:
    """Return the workers that could be chosen, as their cards were at the admission, with the steps that each did."""
    rows: list[Data] = []
    for name in run.state.admitted.pool:
        worker = run.pool.get(name)
        row: Data = {"worker": name, "strengths": [], "input_usd": None, "output_usd": None}
        if worker is not None:
            row["strengths"] = list(worker.card.strengths)
        if worker is not None and worker.priced:
            row |= {"input_usd": worker.price.input / MILLION, "output_usd": worker.price.output / MILLION}
        row["steps"] = [step.n for step in run.steps if step.worker == name and step.state == "done"]
        rows.append(row)
    return rows


def _list_excluded(run: _ExplainedRun) -> list[Data]:
    """Return the workers that could not be chosen, each with the reason and with who decided so."""
    rows = [_describe_exclusion(name, reason, None) for name, reason in run.state.admitted.excluded.items()]
    for fact in facts(run.events, PlanOpened):
        for name, reason in (fact.ejected or {}).items():
            rows.append(_describe_exclusion(name, f"{EJECTED}: {reason}", fact.proposal))
    return rows


def _describe_exclusion(worker: str, reason: str, proposal: int | None, otherwise: str = "ability") -> Data:
    return {"worker": worker, "reason": reason, "by": decided_by(reason) or otherwise, "proposal": proposal}


def _approval(run: _ExplainedRun, question: RunAwaitingApproval) -> Data:
    """Return a plan that needed an approval: why, and who decided what. There is no decision while it waits."""
    worst_case_usd = None
    if question.price is not None:
        worst_case_usd = dollars(question.price)
    fields: Data = {
        "proposal": question.proposal,
        "needed_because": list(question.reasons),
        "worst_case_usd": worst_case_usd,
        "decision": None,
        "by": None,
        "max_usd": None,
        "reason": run.reason("", asked=True),
    }
    for expiry in facts(run.events, RunApprovalExpired):
        if expiry.proposal == question.proposal:
            fields["decision"] = "expired"
    for refusal in facts(run.events, RunRefused):
        if refusal.digest == question.digest:
            fields |= {"decision": "refused", "by": refusal.by}
            fields["reason"] = run.reason(refusal.reason, asked=True)
            break
    for approval in facts(run.events, RunApproved):
        if approval.digest == question.digest:
            fields |= {"decision": "approved", "by": approval.by, "max_usd": dollars(approval.max_usd)}
            fields["reason"] = run.reason(approval.reason, asked=True)
            break
    return fields


# -- the steps


def _steps(run: _ExplainedRun) -> list[Data]:
    records = {step["n"]: step for step in run.whole["steps"]}
    return [_step(run, step, records[step.n]) for step in run.steps]


def _step(run: _ExplainedRun, step: StepState, record: Data) -> Data:
    planned = run.plan_steps[step.n]
    proposal = run.state.find_proposal(step.proposal)
    asks_reasons = run.asks_reasons(step.proposal)
    by = find_decider(proposal, run.events)
    attempts = record["attempts"]
    has_begun = bool(attempts) or step.n in run.state.nested
    return {
        "n": step.n,
        "round": proposal.round,
        "parent": proposal.parent,
        "state": step.state,
        "error": step.error or None,
        "has_begun": has_begun,
        "kept_from": record["kept_from"],
        "worker": step.worker,
        "planned_worker": planned.worker,
        "chosen_by": by,
        "nested": step.worker == CONDUCTOR,
        "probability": planned.probability,
        "reason": run.reason(planned.why, asked=asks_reasons),
        "saw": _describe_seen(run, step, has_begun=has_begun),
        "withheld": _describe_withheld(run, step, by)
        | {"reason": run.reason(planned.why_withheld, asked=asks_reasons)},
        "calls": [_call(attempt) for attempt in attempts],
        "call_count": len(attempts),
        "failed_calls": sum(attempt["outcome"] not in ("ok", None) for attempt in attempts),
        "replaced": step.worker != planned.worker,
        "not_called": _list_passed_over(record),
        "cost_usd": record["cost_usd"],
    }


def _describe_seen(run: _ExplainedRun, step: StepState, *, has_begun: bool) -> Data:
    """Return the sources of the messages of the step's worker, besides its subtask. Of a step that has not begun these
    are all that its access list grants, because others may still give an output."""
    unseen: Sequence[int] = ()
    if has_begun:
        unseen = steps_without_output(run.state, step.access.steps)
    task_of = None
    if step.inherits:
        task_of = run.state.find_proposal(step.proposal).parent
    return {
        "user": step.access.user,
        "task_of": task_of,
        "steps": [n for n in step.access.steps if n not in unseen],
        "unseen": list(unseen),
        "tool_results": sum(bool(exchange.results) for exchange in step.exchanges),
    }


def _describe_withheld(run: _ExplainedRun, step: StepState, by: str) -> Data:
    proposal = run.state.find_proposal(step.proposal)
    siblings = [planned for planned in run.steps if planned.proposal == step.proposal]
    hidden = find_withheld(run.state, step, proposal, by, siblings)
    return {"user": hidden.user, "steps": list(hidden.steps), "by": hidden.by or None}


def _call(attempt: Mapping[str, Any]) -> Data:
    names = ("worker", "outcome", "error", "reason", "cost_usd", "seconds", "despite")
    return {name: attempt.get(name) for name in names}


def _list_passed_over(step: Mapping[str, Any]) -> list[Data]:
    """Return the workers that were passed over for any of a step's calls, each once for each reason."""
    passed_over: list[Mapping[str, str]] = []
    for call in step["attempts"]:
        passed_over += call["passed_over"]
    passed_over += step["passed_over"]
    rows: dict[tuple[str, str], Data] = {}
    for entry in passed_over:
        worker, reason = entry["worker"], entry["reason"]
        rows[worker, reason] = _describe_exclusion(worker, reason, None, "health")
    return list(rows.values())


# -- money, and what speaks for the answer


def _cost(run: _ExplainedRun) -> Data:
    """Return the cost of the run, and the cost of its steps with the cheapest worker, as reports compute it."""
    prices = {name: worker.price for name, worker in run.pool.items() if worker.priced}
    calls = list(run.state.calls.values())
    planning = sum(call.usd for call in calls if call.step is None)
    fields: Data = {
        "cost_usd": dollars(run.state.usd),
        "planning_usd": dollars(planning),
        "steps_usd": dollars(run.state.usd - planning),
        "call_count": len(calls),
        "estimated": any(call.usage.estimated for call in calls),
        "unknown_calls": sum(call.outcome == "unknown" for call in calls),
        "cheapest_worker": None,
        "cheapest_usd": None,
        "difference_usd": None,
        "dearer": None,
        "method": CHEAPEST_METHOD,
    }
    cheapest = compare_with_cheapest(run.state.admitted.pool, run.events, prices)
    if cheapest is not None:
        fields |= {"cheapest_worker": cheapest.worker, "cheapest_usd": dollars(cheapest.least)}
        fields |= {
            "difference_usd": dollars(abs(cheapest.usd - cheapest.least)),
            "dearer": cheapest.usd > cheapest.least,
        }
    return fields


def _answer(run: _ExplainedRun) -> Data:
    """Return the facts that speak for the answer: how it ended, which steps it rests on, which of them agree, and its
    ratings."""
    state, end = run.state, run.state.end
    fields: Data = {
        "step": None,
        "worker": None,
        "finish": None,
        "refusal": False,
        "rests_on": [],
        "same_text": [],
        "other_answers": [],
        "accepted_in_round": _find_accepting_round(state),
        "form_repairs": _repairs(run),
        "fell_back": False,
        "stopped": None,
        "degraded": state.degraded,
        "error": None,
        "ratings": list(map(_rating, chain.from_iterable(run.whole["feedback"].values()))),
    }
    if end is not None:
        fields |= {"fell_back": end.fell_back, "stopped": end.stopped or None, "error": end.error or None}
    if end is not None and end.step is not None:
        step = state.steps[end.step]
        fields |= {"step": step.n, "worker": step.worker, "finish": step.finish, "refusal": step.refusal}
        rests_on = _describe_seen(run, step, has_begun=True)["steps"]
        fields |= {"rests_on": rests_on, "same_text": _same_text(run, step)}
        fields["other_answers"] = _find_other_outputs(run, step)
    return fields


def _find_accepting_round(state: RunState) -> int | None:
    """Return the last round in which the conductor accepted the answer by an empty plan; None without any."""
    accepted_in = None
    for proposal in state.proposals:
        if proposal.state == "accepted" and proposal.round > 1 and not proposal.topology:
            accepted_in = proposal.round
    return accepted_in


def _rating(rating: Data) -> Data:
    score = rating["score"]
    if score is not None:
        score = round(score, DIGITS)
    return {"kind": rating["kind"], "source": rating["source"], "score": score, "label": rating["label"]}


def _find_other_outputs(run: _ExplainedRun, answer: StepState) -> list[int]:
    """Return the steps with an output of their own, besides the answering one. Where that took its output from steps
    inside it, theirs is the answer as well."""
    sources = {fact.n: fact.from_step for fact in facts(run.events, StepDone)}
    answering: list[int] = []
    source: int | None = answer.n
    while source is not None and source not in answering:
        answering.append(source)
        source = sources.get(source)
    return [step.n for step in run.steps if step.n not in answering and step.chars and step.worker != CONDUCTOR]


def _same_text(run: _ExplainedRun, answer: StepState) -> list[int]:
    """Return the other steps whose output is the same text. One salt is used for all texts of a run, so equal refs are
    equal texts."""
    return [n for n in _find_other_outputs(run, answer) if answer.output and run.state.steps[n].output == answer.output]


def _repairs(run: _ExplainedRun) -> int:
    """Return how often a worker was asked again because its answer did not match the requested format."""
    return sum(event.kind.value == "call.intended" and bool(event.body.get("repairs")) for event in run.events)


# -- what nobody knows


def _list_gaps(data: Data) -> list[Data]:
    """Return the gaps of the explanation, each with its cause."""
    gaps: list[Data] = []
    shape = data["shape"]
    if _has_reasons(shape["decided_by"]) and shape["reason"]["state"] != "given":
        gaps.append(_gap("shape", None, shape["reason"]["state"]))
    for step in data["steps"]:
        if not _has_reasons(step["chosen_by"]):
            continue
        if step["reason"]["state"] not in ("given", "not_asked"):
            gaps.append(_gap("worker", step["n"], step["reason"]["state"]))
        if step["probability"] is None:
            gaps.append(_gap("probability", step["n"], "not_reported"))
    choice = shape["choice"]
    if choice is not None and any(alternative["success"] is None for alternative in choice["alternatives"]):
        gaps.append(_gap("prediction", None, "not_journaled"))
    return gaps + _open_questions(data)


def _open_questions(data: Data) -> list[Data]:
    gaps: list[Data] = []
    calls = list(chain.from_iterable([step["calls"] for step in data["steps"]]))
    if any(call["outcome"] for call in calls) and data["cost"]["cheapest_usd"] is None:
        gaps.append(_gap("cheapest", None, "no_prices"))
    if data["cost"]["unknown_calls"]:
        gaps.append(_gap("cost", None, "outcome_lost"))
    if data["cost"]["estimated"]:
        gaps.append(_gap("cost", None, "usage_estimated"))
    if data["answer"]["step"] is not None and not data["answer"]["ratings"]:
        gaps.append(_gap("quality", None, "not_rated"))
    if set(data["answer"]["other_answers"]) - set(data["answer"]["same_text"]):
        gaps.append(_gap("agreement", None, "not_compared"))
    if calls:
        gaps.append(_gap("workers_reasons", None, "not_observable"))
    return gaps


def _has_reasons(by: str | None) -> bool:
    return by == "conductor"


def _gap(about: str, step: int | None, cause: str) -> Data:
    return {"about": about, "step": step, "cause": cause}
