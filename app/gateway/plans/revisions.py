"""A plan that was made over HTTP, and its revisions, as their journals have them.

Each revision is a run of its own that was planned and not executed (a preview): the first one has the plan that the
tier's conductor made, and gives the plan its id; each further one was written by a caller and follows from the first.
So a plan's texts are content of its runs, erased and pruned with them, and what is asked of a caller's own plan is
asked of every edit.
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from app.core.plan.digest import plan_digest
from app.core.plan.published_format import to_lists
from app.core.plan.workflow import Access, Step
from app.core.pool.catalog import Limits
from app.core.run.fold import fold
from app.core.run.identifiers import format_reply_id, run_of_reply
from app.core.run.kinds import ENDED
from app.core.run.state import RunState, StepState
from app.engine.calls.step_request import texts_of
from app.errors import InvalidRequest, NotFound, PlanRejected
from app.gateway.wire import query
from app.store.protocol import PLAN_TAG, RunQuery, RunRow, TenantStore

FORMAT: Final = "plan"
"""The wire format of a revision; the field `reply` is that of the request, in which the plan's answer is written."""
MOST_REVISIONS: Final = 100


class Revision(Struct, frozen=True):
    """One revision: its run, and its number from 1."""

    number: int
    state: RunState
    author: str
    """The id of the API key that made it."""

    @property
    def stands(self) -> bool:
        """Return True if its plan was accepted."""
        return self.state.state == "succeeded" and self.state.has_workflow

    @property
    def is_open(self) -> bool:
        """Return True while it is being made."""
        return self.state.state not in ENDED


class Plan(Struct, frozen=True):
    """A plan with its revisions, the oldest first, among them those that could not be made."""

    revisions: tuple[Revision, ...]

    @property
    def run(self) -> str:
        """Return the run of the first revision."""
        return self.first.state.run

    @property
    def id(self) -> str:
        """Return the plan's id."""
        return plan_id(self.run)

    @property
    def first(self) -> Revision:
        """Return the revision with the request's task, limits and options, which all others share."""
        return self.revisions[0]

    @property
    def latest(self) -> Revision:
        """Return the last revision whose plan was accepted. Raises `NotFound` if there is none."""
        for revision in reversed(self.revisions):
            if revision.stands:
                return revision
        raise NotFound("No plan was made for this request: its run says why.", code="plan_not_made")

    def revision(self, number: int | None) -> Revision:
        """Return the revision of this number, by default the latest. Raises `NotFound`."""
        if number is None:
            return self.latest
        for revision in self.revisions:
            if revision.number == number and revision.stands:
                return revision
        raise NotFound("The plan has no revision of that number.", param="revision", code="no_such_revision")


def plan_id(run: str) -> str:
    """Return the id of the plan whose first revision is this run."""
    return format_reply_id(FORMAT, run, 0)


async def find(store: TenantStore, name: str) -> tuple[Plan, RunRow]:
    """Return a plan by its id, with the row of its first revision. Raises `NotFound`, also for one that was deleted."""
    plan, row = await find_with_deleted(store, name)
    require_not_deleted(row)
    return plan, row


async def find_with_deleted(store: TenantStore, name: str) -> tuple[Plan, RunRow]:
    """Return a plan as `find` does, also one that was deleted: its texts are erased, and the rest is journaled."""
    if not query.RUN_ID.fullmatch(name):
        raise NotFound()
    row = await store.run(run_of_reply(name))
    first = await _revision(store, row)
    wire = first.state.admitted.wire
    if wire.get("format") != FORMAT or wire.get("revision") != 1:
        raise NotFound()
    run_query = RunQuery(tenant=row.tenant, tags=((PLAN_TAG, row.id),), ascending=True, limit=MOST_REVISIONS)
    further = [await _revision(store, run) for run in await store.runs(run_query)]
    return Plan((first, *sorted(further, key=lambda revision: revision.number))), row


def require_not_deleted(row: RunRow) -> None:
    """Raise `NotFound` if the plan whose first revision has this row was deleted."""
    if row.erased:
        raise NotFound("The plan was deleted.", code="plan_deleted")


async def _revision(store: TenantStore, row: RunRow) -> Revision:
    state = fold((await store.journal(row.id)).events)
    return revision_of_state(state, row.key)


def revision_of_state(state: RunState, author: str) -> Revision:
    """Return the revision that a preview's run is."""
    return Revision(int(state.admitted.wire.get("revision", 1)), state, author)


# -- its steps


async def steps_of(store: TenantStore, revision: Revision) -> tuple[Step, ...]:
    """Return the steps of a revision, counted from 0. Raises `NotFound` if their texts were erased."""
    state = revision.state
    texts = await texts_of(store, state.run, {step.subtask for step in state.current_steps})
    base = 0
    if state.proposal is not None:
        base = state.proposal.base
    return tuple([_step(step, texts, base) for step in state.current_steps])


def _step(step: StepState, texts: Mapping[str, str], base: int) -> Step:
    access = Access(step.access.user, tuple([n - base for n in step.access.steps]))
    return Step(step.worker, texts[step.subtask], access, answers=step.answers, tools=step.tools)


def limits_of(limits: Limits) -> Limits:
    """Return the limits with which a plan is executed: it is the caller's own, which has one round and no workflow
    inside."""
    return replace(limits, rounds=1, depth=0)


def digest_of(revision: Revision, steps: tuple[Step, ...]) -> str:
    """Return the SHA-256 of a revision's plan with its limits, by which what was shown and what is executed are
    compared."""
    return plan_digest(steps, limits_of(revision.state.admitted.limits))


def as_value(steps: tuple[Step, ...]) -> dict[str, Any]:
    """Return a plan in the form in which callers send one."""
    return {"steps": [_as_value(step) for step in steps]}


def _as_value(step: Step) -> dict[str, Any]:
    value = {"worker": step.worker, "subtask": step.subtask, "access": step.access.as_list()}
    if not step.tools:
        return value
    return value | {"tools": True}


def as_lists(steps: tuple[Step, ...], pool: tuple[str, ...]) -> dict[str, Any]:
    """Return a plan in the published form of three lists. Raises `InvalidRequest` for one that this form cannot say."""
    try:
        return to_lists(steps, pool)
    except PlanRejected as rejected:
        message = f"The plan cannot be written as three lists: {'; '.join(rejected.reasons)}."
        raise InvalidRequest(message, param="format", code="plan_not_expressible") from None
