"""Bugs that are put into the product on purpose, one at a time, and the checks that must notice each.

A bug is a small patch that breaks one promise, together with the fault rates under which that matters. `test_zoo.py`
plays seeds until a check objects, and the same seeds without the bug, where none may object.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, delete, update

from app.core.plan.workflow import Access
from app.core.pool.catalog import Amount, Deadlines
from app.core.pool.rules import Reading
from app.core.run import drafts, notices, visibility
from app.core.run.caller_view import unspent_amount
from app.core.run.events import Event, StepFailed
from app.core.run.state import RunState
from app.engine.calls import step_request
from app.engine.calls.attempt import Attempt
from app.engine.calls.step_request import Candidates
from app.engine.commit import run_writer
from app.engine.commit.run_writer import RunWriter
from app.engine.delivery.followers import Audience
from app.engine.delivery.webhooks import DeliveryResult, Webhooks
from app.engine.runs import driver, planning
from app.engine.runs.recovery import Recovery
from app.engine.steps import execution
from app.engine.steps.claimed_step import PendingOutcomes
from app.engine.steps.dispatcher import Dispatcher
from app.engine.steps.execution import Execution
from app.errors import LeaseLost, RunOverBudget, StoreUnavailable
from app.store.protocol import AppendResult, Entry, TicketMove
from app.store.rows import content, runs
from app.store.sql import SqlStore
from app.store.sqlkit.statements import Statements
from app.store.sqlkit.tables import CONTENTS, RUNS
from app.store.writing import batch, group_commit
from app.store.writing.batch import encode
from tests.simulation import deciding, handing

Patch = pytest.MonkeyPatch
CALM: Mapping[str, float] = {}
KILLS = {"process.killed": 0.3, "crash at store.committed": 0.03, "crash at worker.piece": 0.03}
ZOMBIES = {"process.frozen": 0.9, "worker.slow": 0.5}
SLEEPERS = {"freeze at worker.received": 0.7}
COMMITS = {"store.commit.unanswered_written": 0.15, "store.commit.unanswered_not_written": 0.15}
LOST_WRITES = {"store.write.down": 0.3, "crash at store.write": 0.05}
LABELLED = {"caller.labels": 0.9}
POOR = {"caller.brings_little_money": 0.9}
CANCELS = {"caller.cancels": 0.9, "worker.slow": 0.9}
LATE = {**CANCELS, "queue.tell.lost": 1.0}
TORN = {"crash at worker.piece": 0.3}
ERRORS = {"worker.unavailable": 0.6}
OUTAGES = {"store.outage": 0.3}
HANGS = {"worker.hangs_at_first": 0.5}
DEADLY = {"crash at worker.received": 1.0}
ABANDONED = {"caller.abandons": 0.9}
WAVERS = {"caller.wavers": 0.9}
DELIVERIES = {"crash at webhook.sent": 0.9}
REFUSALS = {"receiver.refuses": 0.5}
ERASURES = {"caller.erases": 0.9}
LATE_WORDS = {"caller.erases": 1.0, "freeze at worker.received": 0.6, "worker.slow": 0.9}
LOST_RINGS = {"queue.ring.lost": 0.9}
DRAINS = {"process.drained": 0.5, "worker.slow": 0.3}
LEFT, TAKEN_UP = "oracle.who_stops_leaves_nothing_behind", "oracle.what_is_given_up_is_taken_up"


@dataclass(frozen=True)
class Bug:
    """A guarantee that is taken away: how, under which faults, and the checks of which one must notice."""

    name: str
    put_in: Callable[[Patch], None]
    fault_rates: Mapping[str, float]
    noticed_by: tuple[str, ...]


# -- the store


def no_epoch_fence(patch: Patch) -> None:
    check = batch._check_order

    def lax(run: Any, entry: Entry) -> None:
        check(run, replace(entry, epoch=run.epoch) if entry.epoch is not None else entry)

    patch.setattr(batch, "_check_order", lax)


def no_claim_fence(patch: Patch) -> None:
    def anybodys(rows: Any, run: str, move: TicketMove, _at: float) -> Any:
        ticket = rows._tickets.get((run, move.step))
        if ticket is None or ticket.is_deleted:
            raise LeaseLost
        return ticket

    patch.setattr(batch.RowBatch, "_ticket", anybodys)


def acknowledge_before_the_commit(patch: Patch) -> None:
    append = SqlStore.append

    async def hasty(store: SqlStore, entry: Entry) -> AppendResult:
        if entry.new is None:
            return await append(store, entry)
        written = store.writer.put(encode(entry))
        written.add_done_callback(lambda finish: finish.cancelled() or finish.exception())
        bodies = [orjson.loads(orjson.dumps(draft.to_json())) for draft in entry.events]
        pairs = enumerate(zip(entry.events, bodies, strict=True), 1)
        return AppendResult(tuple(Event(entry.run, seq, draft.kind, entry.at, body) for seq, (draft, body) in pairs))

    patch.setattr(SqlStore, "append", hasty)


def believe_an_unanswered_commit(patch: Patch) -> None:
    patch.setattr(group_commit, "was_committed", lambda conn, outcomes: True)


def repeat_an_unanswered_commit(patch: Patch) -> None:
    patch.setattr(group_commit, "was_committed", lambda conn, outcomes: False)


def believe_a_guess(patch: Patch) -> None:
    def believed(statements: Statements, conn: Connection, *arguments: Any) -> bool:
        statements.write(conn, *arguments[1:])
        return True

    patch.setattr(Statements, "write_if_current", believed)


def take_over_without_raising_the_epoch(patch: Patch) -> None:
    adopt = runs.take_over

    def quiet(conn: Connection, **arguments: Any) -> Any:
        rows = adopt(conn, **arguments)
        conn.execute(update(RUNS).where(RUNS.c.id.in_([row.id for row in rows])).values(epoch=RUNS.c.epoch - 1))
        return tuple(replace(row, epoch=row.epoch - 1) for row in rows)

    patch.setattr(runs, "take_over", quiet)


def ring_without_an_outbox_row(patch: Patch) -> None:
    file = batch.RowBatch._apply_rows
    patch.setattr(batch.RowBatch, "_apply_rows", lambda rows, run, entry: file(rows, run, replace(entry, outbox=())))


def write_after_the_end(patch: Patch) -> None:
    def lax(run: Any, entry: Entry) -> None:
        if entry.epoch is not None and entry.epoch != run.epoch:
            raise LeaseLost

    patch.setattr(batch, "_check_order", lax)


def end_twice(patch: Patch) -> None:
    write_after_the_end(patch)
    ending = driver.ending
    for writes in (driver, run_writer):
        patch.setattr(writes, "ending", lambda state, command: (*ending(state, command), ending(state, command)[-1]))


def overspend(patch: Patch) -> None:
    balance = batch._balance

    def rich(run: Any, entry: Entry) -> tuple[int, int, int, int]:
        try:
            return balance(run, entry)
        except RunOverBudget:
            usd, tokens = entry.hold.usd - entry.release.usd, entry.hold.tokens - entry.release.tokens
            spent = run.spent_usd + entry.spent.usd, run.spent_tokens + entry.spent.tokens
            return run.held_usd + usd, run.held_tokens + tokens, *spent

    patch.setattr(batch, "_balance", rich)


def spend_more_than_was_approved(patch: Patch) -> None:
    overspend(patch)
    patch.setattr(execution, "spendable_by_steps", unspent_amount)


def release_the_budget_early(patch: Patch) -> None:
    balance = batch._balance

    def holds_nothing(run: Any, entry: Entry) -> tuple[int, int, int, int]:
        return balance(run, replace(entry, hold=Amount(), release=Amount()))

    patch.setattr(batch, "_balance", holds_nothing)


def refund_twice(patch: Patch) -> None:
    balance = batch._balance

    def generous(run: Any, entry: Entry) -> tuple[int, int, int, int]:
        usd, tokens, *spent = balance(run, entry)
        return max(usd - entry.release.usd, 0), max(tokens - entry.release.tokens, 0), spent[0], spent[1]

    patch.setattr(batch, "_balance", generous)


def bill_twice(patch: Patch) -> None:
    balance = batch._balance

    def greedy(run: Any, entry: Entry) -> tuple[int, int, int, int]:
        held_usd, held_tokens, usd, tokens = balance(run, entry)
        return held_usd, held_tokens, usd + entry.spent.usd, tokens + entry.spent.tokens

    patch.setattr(batch, "_balance", greedy)


# -- a step


def skip_the_intent(patch: Patch) -> None:
    async def silent(self: Execution, attempt: Attempt, openers: Any) -> None:
        await self._append(self._entry(tuple(openers)))

    patch.setattr(Execution, "_commit_intent", silent)


def call_again_after_the_outcome(patch: Patch) -> None:
    stream = Attempt.stream

    async def twice(self: Attempt) -> AsyncIterator[list[Any]]:
        async for pieces in stream(self):
            yield pieces
        async for _ in self._provider.stream(self._request, self._body, self._deadlines()):
            pass

    patch.setattr(Attempt, "stream", twice)


def do_a_step_again_when_it_is_done(patch: Patch) -> None:
    move = batch.RowBatch._move

    def repeat_move(rows: Any, run: Any, ticket: Any, move_given: TicketMove) -> int:
        if move_given.verb == "finish":
            move_given = replace(move_given, verb="release", until=0.0)
        return move(rows, run, ticket, move_given)

    patch.setattr(batch.RowBatch, "_move", repeat_move)
    patch.setattr(Execution, "_has_nothing_to_do", lambda _self, state: state.ended)


def use_an_attempt_number_again(patch: Patch) -> None:
    name_attempt = Execution._attempt

    def first(self: Execution, *arguments: Any) -> Attempt:
        attempt = name_attempt(self, *arguments)
        attempt._planned = replace(attempt._planned, number=1)
        return attempt

    patch.setattr(Execution, "_attempt", first)


def try_without_end(patch: Patch) -> None:
    init = Candidates.__init__
    patch.setattr(Candidates, "__init__", lambda self, health, workers, *_: init(self, health, workers, 99, 99))


def forget_lost_calls(patch: Patch) -> None:
    patch.setattr(Execution, "_outcomes_of_lost_calls", lambda *_: ())


def lose_an_outcome_in_an_outage(patch: Patch) -> None:
    async def lost(_self: PendingOutcomes, _entry: Entry, _append: Callable[[], Any]) -> None:
        raise StoreUnavailable

    patch.setattr(PendingOutcomes, "write_later", lost)


def bury_a_dead_letter_in_silence(patch: Patch) -> None:
    fail = Execution._fail

    async def silent(self: Execution, failed: StepFailed, openers: Any) -> None:
        if failed.error != "dead_letter":
            return await fail(self, failed, openers)
        await self._append(self._entry(openers, move=TicketMove(self._ticket.step, "finish", claim=self._work.claim)))

    patch.setattr(Execution, "_fail", silent)


def _seeing(patch: Patch, wider: Callable[[RunState, int, Access], Access]) -> None:
    view_of_step = execution.view_of_step

    async def peeping(store: Any, state: RunState, n: int, *arguments: Any) -> Any:
        step = replace(state.steps[n], access=wider(state, n, state.steps[n].access))
        return await view_of_step(store, replace(state, steps={**state.steps, n: step}), n, *arguments)

    patch.setattr(execution, "view_of_step", peeping)


def see_a_step_that_is_not_listed(patch: Patch) -> None:
    def all_before(state: RunState, n: int, access: Access) -> Access:
        return Access(access.user, tuple(m for m in range(n) if m in state.steps))

    _seeing(patch, all_before)


def see_the_conversation_unasked(patch: Patch) -> None:
    _seeing(patch, lambda _state, _n, access: Access(True, access.steps))


def let_anybody_read(patch: Patch) -> None:
    patch.setattr(execution, "find_readers", lambda _state, _n, workers: (Reading(), workers, ()))


def pass_words_on_without_labels(patch: Patch) -> None:
    patch.setattr(visibility, "conversation_reading", lambda _state: Reading())


# -- a run


def ignore_expiry(patch: Patch) -> None:
    decide = run_writer.decide
    patch.setattr(run_writer, "decide", lambda state, _now: decide(state, 0.0))
    patch.setattr(Execution, "_seconds_left", lambda *_: 1e6)
    patch.setattr(Attempt, "_deadlines", lambda _self: Deadlines(1e6, 1e6, 1e6, 1e6))


def ignore_a_cancellation(patch: Patch) -> None:
    decide = run_writer.decide
    patch.setattr(run_writer, "decide", lambda state, now: decide(replace(state, cancel_asked=False), now))


def leave_orphans_alone(patch: Patch) -> None:
    async def nothing(*_: object) -> bool:
        return False

    patch.setattr(Recovery, "_take_over", nothing)


def wait_for_the_bell_alone(patch: Patch) -> None:
    async def none(*_: object) -> Any:
        return ()

    patch.setattr(Dispatcher, "_take_from_outbox", none)
    patch.setattr(SqlStore, "announce_overdue_tickets", none)
    handing.find_nothing_by_looking(patch)


def drop_the_last_words(patch: Patch) -> None:
    patch.setattr(Audience, "_end", lambda _self, listener, ended: listener.mailbox.push(ended))


def tell_a_reply_twice(patch: Patch) -> None:
    end = Audience._end

    def again(self: Audience, listener: Any, ended: Any) -> None:
        listener.chars = 0
        end(self, listener, ended)

    patch.setattr(Audience, "_end", again)


def go_on_with_other_words(patch: Patch) -> None:
    patch.setattr(Audience, "_objection", lambda *_: None)


# -- turns, nesting, notices, erasure


def wait_for_results_without_end(patch: Patch) -> None:
    decide = run_writer.decide

    def patient(state: RunState, now: float) -> Any:
        return () if state.state == "awaiting_tool" and not state.cancel_asked else decide(state, now)

    patch.setattr(run_writer, "decide", patient)


def forget_what_tools_said(patch: Patch) -> None:
    use = step_request.ToolUse
    patch.setattr(step_request, "ToolUse", lambda *arguments: replace(use(*arguments), results=()))


def widen_the_view_inside(patch: Patch) -> None:
    granted = drafts.access_in_run
    patch.setattr(drafts, "access_in_run", lambda *arguments: replace(granted(*arguments), user=True))


def nest_without_end(patch: Patch) -> None:
    patch.setattr(planning, "may_nest", lambda *_: True)


def end_without_a_notice(patch: Patch) -> None:
    patch.setattr(batch.RowBatch, "_add_notice", lambda *_: None)


def forget_a_notice_with_its_process(patch: Patch) -> None:
    deliver = Webhooks._deliver

    async def hasty(self: Webhooks, client: Any, target: Any, notice: Any) -> None:
        await self._context.store.close_notice(notice)
        await deliver(self, client, target, notice)

    patch.setattr(Webhooks, "_deliver", hasty)


def take_a_refusal_for_a_delivery(patch: Patch) -> None:
    patch.setattr(DeliveryResult, "delivered", property(lambda result: result.status > 0))


def sign_other_words(patch: Patch) -> None:
    headers = notices.headers
    patch.setattr(notices, "headers", lambda secrets, name, body, now: headers(secrets, name, body + b" ", now))


def erase_the_words_and_not_the_salt(patch: Patch) -> None:
    def halfway(conn: Connection, run: str, **_statements: object) -> bool:
        conn.execute(delete(CONTENTS).where(CONTENTS.c.run == run))
        return True

    patch.setattr(content, "erase_one", halfway)


def write_after_the_erasure(patch: Patch) -> None:
    file = batch.RowBatch._apply_rows

    def late(rows: Any, run: Any, entry: Entry) -> Any:
        run.salt = b""
        return file(rows, run, entry)

    patch.setattr(batch.RowBatch, "_apply_rows", late)


def log_in_vain(patch: Patch) -> None:
    """Something breaks in a driver; the next one repairs it, and nobody else would notice."""
    enqueue = RunWriter._enqueue

    async def breaks(self: Any, outbox: Any) -> None:
        await enqueue(self, outbox)
        raise KeyError(self.state.run)

    patch.setattr(RunWriter, "_enqueue", breaks)


BUGS = (
    Bug("no epoch fence", no_epoch_fence, ZOMBIES, ("witness",)),
    Bug("no claim fence", no_claim_fence, SLEEPERS, ("witness",)),
    Bug("acknowledge before the commit", acknowledge_before_the_commit, LOST_WRITES, ("oracle.strangers",)),
    Bug("believe an unanswered commit", believe_an_unanswered_commit, COMMITS, ("oracle.strangers", "witness")),
    Bug("repeat an unanswered commit", repeat_an_unanswered_commit, COMMITS, ("witness",)),
    Bug("believe a guess", believe_a_guess, ZOMBIES, ("witness",)),
    Bug("join without the epoch", handing.join_without_the_epoch, ZOMBIES, ("witness",)),
    Bug("take over without raising the epoch", take_over_without_raising_the_epoch, ZOMBIES, ("witness",)),
    Bug(
        "ring without an outbox row", ring_without_an_outbox_row, CALM, ("oracle.nothing_is_degraded_without_a_fault",)
    ),
    Bug("write after the end", write_after_the_end, LATE, ("oracle.it_ends_once",)),
    Bug("end twice", end_twice, CALM, ("oracle.it_ends_once",)),
    Bug("overspend", overspend, POOR, ("witness",)),
    Bug("release the budget early", release_the_budget_early, CALM, ("witness",)),
    Bug("refund twice", refund_twice, CALM, ("witness",)),
    Bug("bill twice", bill_twice, CALM, ("witness",)),
    Bug("skip the intent", skip_the_intent, CALM, ("witness",)),
    Bug("call again after the outcome", call_again_after_the_outcome, CALM, ("witness",)),
    Bug("do a step again", do_a_step_again_when_it_is_done, CALM, ("oracle.no_step_runs_after_it_is_done",)),
    Bug("use an attempt number again", use_an_attempt_number_again, ERRORS, ("oracle.attempts_are_counted",)),
    Bug("try without end", try_without_end, ERRORS, ("oracle.attempts_are_counted",)),
    Bug("forget lost calls", forget_lost_calls, KILLS, ("oracle.each_intent_has_one_outcome",)),
    Bug(
        "lose an outcome in an outage",
        lose_an_outcome_in_an_outage,
        OUTAGES,
        ("oracle.an_outcome_is_lost_only_with_its_process",),
    ),
    Bug("bury a dead letter in silence", bury_a_dead_letter_in_silence, DEADLY, ("oracle.no_run_is_forgotten",)),
    Bug("see a step that is not listed", see_a_step_that_is_not_listed, CALM, ("oracle.steps_see_what_is_granted",)),
    Bug("let anybody read", let_anybody_read, {**LABELLED, **ERRORS}, ("audit.clearance",)),
    Bug("pass words on without labels", pass_words_on_without_labels, LABELLED, ("audit.clearance",)),
    Bug("see the conversation unasked", see_the_conversation_unasked, CALM, ("oracle.steps_see_what_is_granted",)),
    Bug("ignore expiry", ignore_expiry, HANGS, ("oracle.it_ends_once", "oracle.it_ends_in_time")),
    Bug("ignore a cancellation", ignore_a_cancellation, CANCELS, ("oracle.a_wish_is_heard",)),
    Bug("leave orphans alone", leave_orphans_alone, KILLS, ("oracle.it_ends_once",)),
    Bug("wait for the bell alone", wait_for_the_bell_alone, LOST_RINGS, ("oracle.no_run_is_forgotten",)),
    Bug("drop the last words", drop_the_last_words, CALM, ("oracle.the_caller_is_told_the_truth",)),
    Bug("tell a reply twice", tell_a_reply_twice, CALM, ("oracle.the_caller_is_told_the_truth",)),
    Bug("go on with other words", go_on_with_other_words, TORN, ("oracle.the_caller_is_told_the_truth",)),
    Bug("offer no run", handing.offer_no_run, CALM, ("oracle.it_ends_once",)),
    Bug("take no run", handing.take_no_run, CALM, ("oracle.it_ends_once",)),
    Bug("forget the caller", handing.forget_the_caller, CALM, ("oracle.liveness",)),
    Bug("hand back and keep the lease", handing.hand_back_and_keep_the_lease, DRAINS, (LEFT, TAKEN_UP)),
    Bug("hand back and prolong", handing.hand_back_and_prolong, DRAINS, (LEFT, TAKEN_UP)),
    Bug("take up without raising the epoch", take_over_without_raising_the_epoch, CALM, ("witness",)),
    Bug(
        "stop without handing back",
        handing.stop_without_handing_back,
        DRAINS,
        ("oracle.who_stops_leaves_nothing_behind",),
    ),
    Bug("drain in silence", handing.drain_in_silence, DRAINS, ("oracle.an_outcome_is_lost_only_with_its_process",)),
    Bug("wait for results without end", wait_for_results_without_end, ABANDONED, ("oracle.it_ends_once",)),
    Bug("go on from memory", handing.go_on_from_memory, WAVERS, ("oracle.nobody_is_called_after_a_cancelled_wait",)),
    Bug("forget what tools said", forget_what_tools_said, CALM, ("oracle.steps_see_what_is_granted",)),
    Bug(
        "widen the view inside",
        widen_the_view_inside,
        CALM,
        ("oracle.nothing_widens_inside", "audit.access-widened"),
    ),
    Bug("nest without end", nest_without_end, CALM, ("oracle.nothing_widens_inside",)),
    Bug("end without a notice", end_without_a_notice, CALM, ("oracle.the_receiver_is_told",)),
    Bug("forget a notice", forget_a_notice_with_its_process, DELIVERIES, ("oracle.the_receiver_is_told",)),
    Bug("take a refusal", take_a_refusal_for_a_delivery, REFUSALS, ("oracle.the_receiver_is_told",)),
    Bug("sign other words", sign_other_words, CALM, ("witness",)),
    Bug("erase half", erase_the_words_and_not_the_salt, ERASURES, ("oracle.what_is_erased_is_gone",)),
    Bug("write after the erasure", write_after_the_erasure, LATE_WORDS, ("oracle.what_is_erased_is_gone",)),
    Bug("break and be mended", log_in_vain, CALM, ("witness",)),
    Bug(
        "begin without an approval",
        deciding.begin_without_an_approval,
        deciding.NEEDED,
        ("oracle.no_step_begins_unapproved",),
    ),
    Bug("take any digest", deciding.take_any_digest, deciding.MISTAKES, ("oracle.a_decision_is_kept",)),
    Bug("decide without a fence", deciding.decide_without_a_fence, deciding.DOUBTS, ("oracle.a_decision_is_kept",)),
    Bug(
        "take a changed worker for the same",
        deciding.take_a_changed_worker_for_the_same,
        {**deciding.NEEDED, **deciding.RELOADS},
        ("oracle.approved_workers_are_called_as_they_were_shown",),
    ),
    Bug(
        "spend more than was approved",
        spend_more_than_was_approved,
        deciding.LITTLE,
        ("oracle.an_approved_price_is_kept",),
    ),
    Bug("go on after a refusal", deciding.go_on_after_a_refusal, deciding.REFUSALS, ("oracle.a_refusal_ends_the_run",)),
    Bug(
        "wait for an approval without end",
        deciding.wait_for_an_approval_without_end,
        deciding.SILENCE,
        ("oracle.it_ends_once",),
    ),
    Bug(
        "give a plan up early",
        deciding.give_a_plan_up_early,
        deciding.SILENCE,
        ("oracle.a_wait_for_an_approval_ends",),
    ),
    Bug(
        "ask while steps run",
        deciding.ask_while_steps_run,
        deciding.NEEDED,
        ("oracle.nothing_happens_while_it_waits",),
    ),
    Bug("ask without a notice", deciding.ask_without_a_notice, deciding.NEEDED, ("oracle.the_receiver_is_asked",)),
    Bug(
        "call nobody under an approval",
        deciding.call_nobody_under_an_approval,
        deciding.NEEDED,
        ("oracle.an_approved_plan_is_carried_out",),
    ),
    Bug(
        "leave an approved run alone",
        deciding.leave_an_approved_run_alone,
        deciding.UNHEARD,
        ("oracle.it_ends_once",),
    ),
    Bug(
        "call who has left the pool file",
        deciding.call_who_has_left_the_pool_file,
        {**deciding.RELOADS, **ERRORS},
        ("witness",),
    ),
    Bug(
        "ask a model that conducts no more",
        deciding.ask_a_model_that_conducts_no_more,
        {**deciding.RELOADS, "conductor.garbage": 0.35},
        ("witness",),
    ),
    Bug(
        "admit under the limits of before",
        deciding.admit_under_the_limits_of_before,
        deciding.RELOADS,
        ("oracle.limits_are_those_of_the_pool_file",),
    ),
)
"""All of them."""
