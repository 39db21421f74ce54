"""Bugs of the zoo in decisions on plans, and in how a pool file that is read again comes into force."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from app.core.run import approvals as rules
from app.core.run import progress
from app.core.run.events import RunAwaitingApproval
from app.core.run.kinds import Kind
from app.core.run.progress import AwaitApproval
from app.core.run.state import Proposal, RunState
from app.engine.calls.step_request import Candidates
from app.engine.commit import run_writer
from app.engine.commit.run_writer import Consequences
from app.engine.runs import approvals, client
from app.engine.runs.planning import Planner
from app.errors import Conflict
from app.store.protocol import Entry, Lease
from app.store.writing import batch

Patch = pytest.MonkeyPatch
NEEDED = {"caller.needs_approval": 0.9}
REFUSALS = {**NEEDED, "approver.refuses": 0.9}
SILENCE = {**NEEDED, "approver.is_silent": 0.9}
DOUBTS = {**NEEDED, "approver.wavers": 0.9, "approver.repeats": 0.9}
MISTAKES = {**NEEDED, "approver.mistakes_the_plan": 0.9}
LITTLE = {**NEEDED, "approver.allows_little": 0.9}
UNHEARD = {**NEEDED, "queue.ring.lost": 1.0}
EARLY = 4.0
"""Seconds before its time at which a plan is given up."""
RELOADS: Mapping[str, float] = {"operator.reloads": 0.35}


def begin_without_an_approval(patch: Patch) -> None:
    def never(_state: RunState, _proposal: Proposal) -> bool:
        return False

    patch.setattr(RunState, "is_gated", never)


def take_any_digest(patch: Patch) -> None:
    def any_question(_events: Any, state: RunState, _digest: str, _now: float) -> RunAwaitingApproval:
        if state.state != "awaiting_approval" or state.approval_question is None:
            raise Conflict(code="approval_late")
        return state.approval_question

    patch.setattr(approvals, "_open_question", any_question)


def decide_without_a_fence(patch: Patch) -> None:
    check = batch._check_order

    def lax(run: Any, entry: Entry) -> None:
        if any(fact.kind in (Kind.APPROVED, Kind.REFUSED) for fact in entry.events):
            entry = replace(entry, epoch=run.epoch, seq=None)
        check(run, entry)

    patch.setattr(batch, "_check_order", lax)


def take_a_changed_worker_for_the_same(patch: Patch) -> None:
    patch.setattr(rules, "fingerprint", lambda _catalog, worker: worker.name)


def go_on_after_a_refusal(patch: Patch) -> None:
    patch.setattr(approvals, "decide", lambda _state, _now: ())


def wait_for_an_approval_without_end(patch: Patch) -> None:
    decide = run_writer.decide

    def patient(state: RunState, now: float) -> Any:
        return () if state.state == "awaiting_approval" and not state.cancel_asked else decide(state, now)

    patch.setattr(run_writer, "decide", patient)


def give_a_plan_up_early(patch: Patch) -> None:
    ask, decide = Consequences.await_approval, run_writer.decide

    def briefly(consequences: Consequences, *arguments: Any, **more: Any) -> Any:
        asked = ask(consequences, *arguments, **more)
        assert isinstance(asked, RunAwaitingApproval)
        consequences.lease = Lease("", asked.until - EARLY, asked.until - EARLY)
        return asked

    def hasty(state: RunState, now: float) -> Any:
        return decide(state, now + EARLY if state.state == "awaiting_approval" else now)

    patch.setattr(Consequences, "await_approval", briefly)
    patch.setattr(run_writer, "decide", hasty)


def ask_while_steps_run(patch: Patch) -> None:
    def eager(state: RunState) -> Any:
        pending = state.awaits_approval
        return (AwaitApproval(pending.number),) if pending is not None else ()

    patch.setattr(progress, "_await_approval", eager)


def ask_without_a_notice(patch: Patch) -> None:
    ask = Consequences.await_approval

    def quietly(*arguments: Any, **more: Any) -> Any:
        return ask(*arguments, **more | {"notifies": False})

    patch.setattr(Consequences, "await_approval", quietly)


def call_nobody_under_an_approval(patch: Patch) -> None:
    exclude = rules.exclude_unapproved

    def all_of_them(workers: Any, terms: Any, approval: Any, catalog: Any) -> Any:
        return exclude(workers, terms, approval and replace(approval, workers={}), catalog)

    patch.setattr(rules, "exclude_unapproved", all_of_them)


def leave_an_approved_run_alone(patch: Patch) -> None:
    write_decision = approvals.write_decision

    async def write(*arguments: Any) -> Any:
        return await write_decision(*arguments[:-1], 1e6)

    patch.setattr(approvals, "write_decision", write)


def call_who_has_left_the_pool_file(patch: Patch) -> None:
    patch.setattr(Candidates, "use_only", lambda *_: None)


def ask_a_model_that_conducts_no_more(patch: Patch) -> None:
    patch.setattr(Planner, "_conducts", lambda *_: True)


def admit_under_the_limits_of_before(patch: Patch) -> None:
    in_force = client.admission.with_tier_in_force

    def with_old_limits(catalog: Any, order: Any) -> Any:
        return replace(in_force(catalog, order), limits=order.limits)

    patch.setattr(client.admission, "with_tier_in_force", with_old_limits)
