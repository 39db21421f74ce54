"""The decision on a plan that waits for an approval, made in whichever process receives it.

nobody has decided yet ........... run.approved, and the run is offered to the engines; or run.refused with its end
the same decision once more ...... what was decided, unchanged
anything else .................... 409: another digest, another decision, or a wait that is over

The entry is fenced by the run's epoch and by the number of its last event, so that of two decisions one is written, and
none after the wait's end or for another plan than the one that was shown.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from app.core.contents import content_ref
from app.core.plan.workflow import CONDUCTOR
from app.core.pool.catalog import Catalog
from app.core.run import approvals
from app.core.run.events import Event, Fact, RunApproved, RunAwaitingApproval, RunRefused, facts_with_times
from app.core.run.fold import apply_facts, fold
from app.core.run.kinds import ENDED
from app.core.run.progress import Finish, decide
from app.core.run.state import RunState
from app.engine.commit.run_writer import ending, projection
from app.errors import Conflict, Forbidden, InvalidRequest, LeaseLost, NotFound, Overloaded, RunEnded
from app.store.protocol import MOVED, Entry, Lease, RunRow, Store, TenantStore

MOST_TRIES = 3
"""Tries to write a decision on a run to which others write at the same time."""
CHANGED: Mapping[str, str] = {
    "plan": "the plan",
    "price": "the price",
    "catalog": "the pool file",
    "workers": "the workers that may be called",
}
"""The parts of what is approved, by the field of `run.awaiting_approval`, in words."""


class Decision(Struct, frozen=True):
    """A decision as somebody asks for it. `by` names who decides, and `key` is the id under which their own runs are
    stored: that of their API key, or of a person who has logged in; empty for a command."""

    verdict: Literal["approve", "refuse"]
    digest: str
    by: str
    key: str
    reason: str = ""
    replacements: Sequence[str] = ()
    """Workers that may be called besides those of the plan."""
    max_usd: int | None = None
    """The most that the run may cost in all, in micro-dollars; None: what it has cost and the plan's worst case."""


class RecordedDecision(Struct, frozen=True):
    """A decision that is in the journal. `repeated` says that it was made by an earlier request."""

    fact: RunApproved | RunRefused
    at: float
    state: RunState
    repeated: bool = False


async def write_decision(
    store: Store,
    catalog: Catalog,
    now: Callable[[], float],
    run: str,
    tenant: str | None,
    decision: Decision,
    wait: float,
) -> RecordedDecision:
    """Write a decision on the plan of a run that waits for one. For `wait` seconds an approved run is left to the
    engines that take its ticket; after that engines find it by polling.

    Raises `NotFound`; `Conflict` where there is nothing to decide, or not this; `Forbidden` for one's own run;
    `InvalidRequest` for bounds beyond what the run may have; `StoreUnavailable`.
    """
    own = store.of_tenant(tenant)
    for _ in range(MOST_TRIES):
        row, journal = await own.run(run), await own.journal(run)
        state = fold(journal.events)
        at = now()
        earlier = _earlier_decision(journal.events, decision, state)
        if earlier is not None:
            return earlier
        question = _open_question(journal.events, state, decision.digest, at)
        terms = state.admitted.approval
        if terms is not None and terms.four_eyes and decision.key:
            await _check_second_person(own, row, decision.key)
        reason = ""
        contents: tuple[tuple[str, bytes], ...] = ()
        if decision.reason and journal.salt:  # without a salt, after an erasure, it could be guessed from its hash
            body = decision.reason.encode()
            reason = content_ref(journal.salt, body)
            contents = ((reason, body),)
        try:
            answer = _Answer(catalog, state, question, decision, now=at, reason=reason)
            fact = answer.fact()
            entry, after = _entry(row, state, fact, now=at, wait=wait)
            await store.append(replace(entry, contents=contents))
            return RecordedDecision(fact, at, after)
        except (LeaseLost, RunEnded):
            continue  # somebody else has written: what they wrote is read first
        except Conflict as conflict:
            if conflict.public_code != MOVED:
                raise
    raise Overloaded()


async def _check_second_person(store: TenantStore, row: RunRow, key: str) -> None:
    """Raise `Forbidden` if the key began the run, or wrote the plan that it carries out or an earlier revision of it,
    also where it is a replay or a shadow of a run of that plan, or a replay of what made the plan. A revision that was
    pruned has no author any more, nor have those before it."""
    if key == row.key:
        raise Forbidden("The key that began a run must not decide on its plans.", code="own_run")
    while row.origin_kind:
        try:
            row = await store.run(row.origin_run)
        except NotFound:
            return
        if key == row.key and await _is_plan(store, row.id):
            raise Forbidden("The key that wrote a plan must not decide on it.", code="own_run")


async def _is_plan(store: TenantStore, run: str) -> bool:
    """Return True if the run has only made a plan, a first one or a further revision of one."""
    details = await store.lists.details([run])
    return run in details and details[run].is_preview


def _earlier_decision(events: Sequence[Event], decision: Decision, state: RunState) -> RecordedDecision | None:
    """Return the decision that was made on this digest. Raises `Conflict` if it was another one."""
    earlier = approvals.find_decision(events, decision.digest)
    if earlier is None:
        return None
    at, fact = earlier
    if isinstance(fact, RunRefused) and decision.verdict != "refuse":
        raise Conflict(f"This plan was refused by {fact.by} already.", code="approval_decided")
    if isinstance(fact, RunApproved) and decision.verdict != "approve":
        raise Conflict(f"This plan was approved by {fact.by} already.", code="approval_decided")
    if isinstance(fact, RunApproved) and not _has_same_bounds(fact, decision):
        raise Conflict(f"This plan was approved by {fact.by} already, within other bounds.", code="approval_decided")
    return RecordedDecision(fact, at, state, repeated=True)


def _has_same_bounds(fact: RunApproved, decision: Decision) -> bool:
    """Return True if a repeated approval asks for nothing that the first one has not."""
    return set(decision.replacements) <= fact.workers.keys() and decision.max_usd in (None, fact.max_usd)


def _open_question(events: Sequence[Event], state: RunState, digest: str, now: float) -> RunAwaitingApproval:
    """Return the present question, if it is the one that was decided on and still open. Raises `Conflict` if not."""
    question = state.approval_question
    if question is None:
        raise Conflict("No plan of this run has needed an approval.", code="approval_not_requested")
    if digest != question.digest:
        raise _digest_mismatch(events, state, question, digest)
    if state.state in ENDED:
        raise Conflict(f"The decision came too late: the run has ended as {state.state}.", code="approval_late")
    if state.state != "awaiting_approval" or now >= question.until:
        raise Conflict("The decision came too late: the wait for it is over.", code="approval_late")
    return question


def _digest_mismatch(events: Sequence[Event], state: RunState, question: RunAwaitingApproval, digest: str) -> Conflict:
    """Return the error of a decision on another digest than the present question's: it names what has changed since an
    earlier question with that digest, if there was one."""
    earlier_questions = [fact for _, fact in facts_with_times(events, RunAwaitingApproval) if fact.digest == digest]
    if not earlier_questions:
        return Conflict(
            f"That is not the digest of what this run asks for; GET /v1/approvals/{state.run} shows it.",
            code="approval_digest_mismatch",
        )
    earlier = earlier_questions[0]
    changes = [words for name, words in CHANGED.items() if getattr(earlier, name) != getattr(question, name)]
    return Conflict(
        f"Something else waits for an approval by now; changed since then: {', '.join(changes) or 'the round'}. "
        f"GET /v1/approvals/{state.run} shows it.",
        code="approval_digest_mismatch",
    )


class _Answer(Struct, frozen=True):
    """A decision as the answer to the question of a run, at one time."""

    catalog: Catalog
    state: RunState
    question: RunAwaitingApproval
    decision: Decision
    now: float
    reason: str
    """The ref of the reason; empty without one."""

    def fact(self) -> RunApproved | RunRefused:
        """Return the event of the decision. Raises as `_approval` does."""
        if self.decision.verdict == "refuse":
            return RunRefused(self.question.proposal, self.question.digest, self.decision.by, self.reason)
        return self._approval()

    def _approval(self) -> RunApproved:
        """Return the approval within the bounds of the decision. Raises `InvalidRequest` for bounds that the run cannot
        have, and `Conflict` if no worker is left in the place of one that has changed."""
        question, decision = self.question, self.decision
        workers = self._workers()
        self._check_prices(workers)
        limit = self.state.admitted.limits.usd
        max_usd = decision.max_usd
        if max_usd is None:
            max_usd = limit
            if question.price is not None:
                max_usd = min(question.usd + question.price, limit)
        if not 0 <= max_usd <= limit:
            raise InvalidRequest("The price is above the run's own limit.", param="max_usd", code="invalid_value")
        return RunApproved(
            proposal=question.proposal,
            digest=question.digest,
            binding=approvals.binding_digest(question.digest, decision.by, workers, max_usd),
            by=decision.by,
            deadline=self.now + question.seconds,
            workers=workers,
            max_usd=max_usd,
            reason=self.reason,
        )

    def _workers(self) -> Mapping[str, str]:
        """Return the fingerprints of the workers that may be called: those of the plan and the replacements. One that
        is another worker by now is left out, if the decision names a replacement."""
        question, replacements = self.question, self.decision.replacements
        planned = self._planned_workers()
        unknown = sorted(set(replacements) - question.workers.keys())
        if unknown:
            raise InvalidRequest(
                f"No worker of this run's pool has the name {unknown[0][:128]}; 'workers' of the question lists them.",
                param="replacements",
                code="invalid_value",
            )
        named = list(dict.fromkeys([*planned, *replacements]))  # each once, in this order
        present = approvals.fingerprints(self.catalog, named)
        unchanged = {name: mark for name, mark in present.items() if question.workers.get(name) == mark}
        changed_workers = sorted(set(named) - unchanged.keys())
        if changed_workers and not (replacements and set(changed_workers).isdisjoint(replacements)):
            raise Conflict(
                f"The pool file has another {', '.join(changed_workers)} than when the plan was made, or none: its "
                "model, endpoint or price has changed. Name a worker that has not changed among the replacements, or "
                "refuse the plan and send the request again.",
                code="approval_outdated",
            )
        return unchanged

    def _planned_workers(self) -> list[str]:
        """Return the workers of the plan's steps; a step that opens another workflow has none, nor has one whose output
        is that of an earlier run."""
        steps = self.state.steps_of(self.state.find_proposal(self.question.proposal))
        return [step.worker for step in steps if step.worker != CONDUCTOR and not step.settled]

    def _check_prices(self, workers: Mapping[str, str]) -> None:
        """A worker of unknown price is allowed only where the plan's own price is not known, and the decision names
        none: raise `InvalidRequest` otherwise."""
        unpriced = [name for name in workers if not self.catalog.workers[name].priced]
        is_bounded = self.question.price is not None or self.decision.max_usd is not None
        param = "max_usd"
        if self.decision.max_usd is None:
            param = "replacements"
        if unpriced and is_bounded:
            raise InvalidRequest(
                f"The price of {unpriced[0]} is not known, so that no price can bound this approval: name other "
                "replacements, or send no max_usd where the worker is a planned one.",
                param=param,
                code="invalid_value",
            )


def _entry(
    row: RunRow, state: RunState, fact: RunApproved | RunRefused, *, now: float, wait: float
) -> tuple[Entry, RunState]:
    """Return the entry that writes a decision, and the state after it."""
    lease = None
    facts: list[Fact] = [fact]
    after = apply_facts(state, facts)
    if isinstance(fact, RunApproved):
        lease = Lease("", now + wait, fact.deadline)
    else:
        for command in decide(after, now):
            if isinstance(command, Finish):
                facts += ending(after, command)
        after = apply_facts(state, facts)
    entry = Entry(
        row.id,
        now,
        tuple(facts),
        epoch=row.epoch,
        row=projection(after),
        lease=lease,
        tenant=row.tenant,
        seq=state.seq,
    )
    return entry, after
