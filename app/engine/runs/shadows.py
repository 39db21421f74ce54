"""The shadows of live runs: a share of a tier's runs is repeated under another tier, conductor or worker.

No request passes through this module. An engine reads which runs were admitted, draws a share of them by their ids,
waits until they have ended, and admits each once more as a run of its own while it has little else to do. The reply
was given before, so that nothing of the shadow can delay it or be part of it; and the shadow's row and journal are
its own.

A shadow is admitted at most once, whatever is killed: its id follows from that of the run (`shadow_id`), and the entry
that admits it carries an `IdempotencyRecord` of that id. The notes of what was looked at are stored after it. An
admitted shadow is a run like others and survives like them.

It is bound like its origin: the same labels, the same denied workers, the rules of the pool file. Its money comes from
the budget of the tier's shadows and from no budget of the caller's. A request with tools is only planned, because
nobody would answer the shadow's calls.
"""

import asyncio
import hashlib
import logging
from collections.abc import Sequence, Set
from typing import Final

from msgspec.structs import replace

from app.core.message.chat import Task
from app.core.plan.arms import is_arm, tier_of
from app.core.pool.budgets import shadow_budget
from app.core.pool.catalog import LIMITS, Catalog, Limits, ShadowSpec, Tier
from app.core.pool.policy import DENIED, NOT_ALLOWED, PINNED, Overrides, permits
from app.core.pool.rules import CALLER as CALLERS_WORDS
from app.core.pool.rules import Reading
from app.core.pool.serving import definition, reader_before_approval
from app.core.rating.evidence import PolicyState
from app.core.rating.shadows import STARTED, ShadowNotes, is_sampled, notes_from_json, policy_of, shadow_id
from app.core.run.approvals import lacks_approval
from app.core.run.events import CallIntended, Event, RunAdmitted, facts
from app.core.run.fold import state_of_admission
from app.core.run.state import CALLER, FALLBACK
from app.engine.calls.step_request import task_of
from app.engine.context import EngineContext, Leadership
from app.engine.periodic import look_repeatedly
from app.engine.runs import admission
from app.engine.runs.admission import Order
from app.engine.runs.registry import Drivers
from app.errors import Conflict, InvalidRequest, NotFound, Overloaded, ServiceUnavailable
from app.store.protocol import IdempotencyRecord, RunQuery, RunRow
from app.store.run_pages import run_pages

EVERY_SECONDS = 2.0
"""Seconds between two looks."""
CLAIM_SECONDS = 3 * EVERY_SECONDS
"""Seconds for which the engine that has looked is the one that looks again; it stays so while it has room."""
CLAIM: Final = "shadows"
PAGE = 500
"""Runs that are read at a time."""
LATE_SECONDS = 30.0
"""A run may become visible so long after the time of its admission."""
LOOK_BACK_SECONDS = 3_600.0
"""Runs that were admitted longer ago when they are first looked at get no shadow: their tier had none."""
REMEMBERED_SECONDS = 7 * 86_400.0
"""Seconds for which a shadow's id is remembered; long after its origin is last looked at."""
MOST_AT_ONCE = 8
"""Shadows that one engine drives at a time."""


class Shadows:
    """The task of an engine that starts shadows. One engine of the service does so at a time."""

    def __init__(self, context: EngineContext, drivers: Drivers) -> None:
        self._context = context
        self._drivers = drivers
        self._leadership = Leadership(context, CLAIM, CLAIM_SECONDS)
        self._notes: dict[str, tuple[int, ShadowNotes]] = {}
        """The notes of each tier, with their number."""
        self._shown: frozenset[str] = frozenset()
        """The tiers of which the metrics show the runs that wait."""
        self._driven_here: set[str] = set()
        """Shadows that were admitted here, and may be driven here still."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Look until `stopping` is set. After an outage the next look finds the same runs."""
        await look_repeatedly(self.look, stopping, EVERY_SECONDS, self._context.telemetry, "The start of shadows")

    async def look(self) -> None:
        """Look once at every tier that has a shadow, unless another engine does."""
        catalog = self._context.catalog()
        tiers = [(tier, tier.shadow) for tier in catalog.tiers.values() if tier.shadow is not None]
        self._stop_showing(self._shown - {tier.name for tier, _ in tiers})
        if not tiers or not self._context.clock_is_set():
            return
        if not await self._leadership.acquire(prolongs=self._has_room):  # another engine may have some
            return self._stop_showing(self._shown)
        for tier, spec in tiers:
            await self._look_at(catalog, tier, spec)

    def _stop_showing(self, tiers: Set[str]) -> None:
        for tier in tiers:
            self._context.telemetry.unwatch("baton_shadows_waiting", tier)
        self._shown -= tiers

    # -- runs that wait for their shadows

    async def _look_at(self, catalog: Catalog, tier: Tier, spec: ShadowSpec) -> None:
        number, before = await self._read_notes(tier.name)
        notes = await self._add_drawn_runs(catalog, tier.name, spec, before)
        waiting: list[str] = []
        for place, run in enumerate(notes.waiting):
            if not self._has_room:
                waiting += notes.waiting[place:]
                break
            outcome = await self._start_shadow(catalog, tier, spec, run)
            if not outcome:
                waiting.append(run)
                continue
            notes = self._count(tier.name, notes, outcome)
        notes = replace(notes, waiting=tuple(waiting))
        self._context.telemetry.gauge("baton_shadows_waiting", len(waiting), tier.name)
        self._shown |= {tier.name}
        if notes != before and _is_worth_storing(before, notes):
            await self._store(tier.name, number, notes)

    async def _read_notes(self, tier: str) -> tuple[int, ShadowNotes]:
        """Return the notes of a tier with their number; new ones begin now."""
        number, notes = self._notes.get(tier, (0, ShadowNotes()))
        stored = await self._context.store.find_learned_state(policy_of(tier), number)
        if stored is not None:
            number, notes = stored.number, notes_from_json(stored.body)
        oldest = self._context.now() - LOOK_BACK_SECONDS
        if not number:
            notes = replace(notes, mark=self._context.now())
            await self._store(tier, 0, notes)
            number, notes = self._notes.get(tier, (0, notes))
        return number, replace(notes, mark=max(notes.mark, oldest))

    async def _store(self, tier: str, number: int, notes: ShadowNotes) -> None:
        """Store notes in the place of those with this number; if another engine has stored some since, those stay."""
        learned = PolicyState(number + 1, notes.to_json())
        if await self._context.store.learn(policy_of(tier), learned, self._context.now()):
            self._notes[tier] = (number + 1, notes)

    async def _add_drawn_runs(self, catalog: Catalog, tier: str, spec: ShadowSpec, notes: ShadowNotes) -> ShadowNotes:
        """Return the notes with the runs that were drawn since the last look. Those of an arm of an evaluation are
        none of the tier's own."""
        waiting = list(notes.waiting)
        mark = notes.mark
        recent: set[str] = set()
        query = RunQuery(tier=tier, origin_kind="", since=mark - LATE_SECONDS, ascending=True, limit=PAGE)
        async for rows in run_pages(self._context.store.runs, query):
            for row in rows:
                mark = max(mark, row.created_at)
                if not is_sampled(row.id, spec.share) or is_arm(catalog, row.model):
                    continue
                recent.add(row.id)
                if row.id in notes.seen:
                    continue
                if len(waiting) >= spec.max_waiting:
                    notes = self._count(tier, notes, "queue_full")
                else:
                    waiting.append(row.id)
        return replace(notes, mark=mark, seen=frozenset(recent), waiting=tuple(waiting))

    def _count(self, tier: str, notes: ShadowNotes, outcome: str) -> ShadowNotes:
        """Return the notes with one more run that came out so, and count it in the metrics."""
        self._context.telemetry.count("baton_shadows_total", tier, outcome)
        return replace(notes, counts=notes.counts_with(outcome, self._context.now()))

    @property
    def _has_room(self) -> bool:
        """Return True while this engine may begin a shadow without delaying a caller."""
        self._driven_here = {run for run in self._driven_here if self._drivers.driver_of(run) is not None}
        if len(self._driven_here) >= MOST_AT_ONCE:
            return False
        return self._drivers.is_quiet and not self._context.queue.crowded

    # -- one shadow

    async def _start_shadow(self, catalog: Catalog, tier: Tier, spec: ShadowSpec, run: str) -> str:
        """Start the shadow of a run. Returns what became of it; empty while the run has not ended, and where this
        engine begins no runs any more."""
        try:
            row = await self._context.store.run(run)
            if row.ended_at is None:
                return ""
            events = (await self._context.store.journal(run)).events
            admitted = next(facts(events, RunAdmitted))
            reason = _refusal(catalog, tier, spec, row, admitted, events)
            if reason:
                return reason
            task = await task_of(self._context.store, run, admitted.task)
            order = shadow_order(catalog, tier, spec, row, admitted, task)
            if not _has_reader(catalog, order):
                return "labels"
            if not await self._has_budget(tier.name, spec):
                return "budget"
            return await self._admit(catalog, order)
        except NotFound:
            return "content_erased"
        except InvalidRequest:
            return "no_worker"
        except Overloaded:
            return ""
        except ServiceUnavailable:
            raise
        except Exception as bug:  # a run that cannot be repeated must not keep the others waiting
            self._context.telemetry.log(logging.ERROR, "The shadow of a run could not be started.", bug, run=run)
            return "failed"

    async def _admit(self, catalog: Catalog, order: Order) -> str:
        """Admit a shadow and drive it here. Returns what became of it."""
        admitted = admission.decide_as_ordered(self._context, catalog, order)
        if admitted.conductor == FALLBACK:  # the conductor may not read the conversation, or has no price
            return "labels"
        await self._context.pin(catalog)
        entry, salt = admission.entry(self._context, catalog, admitted, gateway="")
        (event,) = entry.events
        state = state_of_admission(entry.run, event, entry.at, 1)
        try:
            await self._drivers.admit(entry, state, salt, order.task, admitted.policy)
        except Conflict:  # the run, or the record of its id, is there: an engine was stopped before it could note it
            return STARTED
        self._driven_here.add(entry.run)
        return STARTED

    async def _has_budget(self, tier: str, spec: ShadowSpec) -> bool:
        """Set the budget of a tier's shadows as the pool file says. False if nothing is left of it today."""
        store, budget = self._context.store, shadow_budget(tier, spec.usd_per_day)
        stored = await store.budget(budget.id)
        if stored is None or stored.usd != budget.usd:  # somebody may have removed it: then nothing would be counted
            await store.set_budget(replace(budget, created_at=self._context.now()))
        windows = await store.budget_use(budget.id, 1)
        if not windows or windows[0].end <= self._context.now():
            return budget.usd > 0
        return windows[0].spent + windows[0].held < budget.usd


def _is_worth_storing(before: ShadowNotes, after: ShadowNotes) -> bool:
    """Return False if no run was drawn or came out, and the mark need not be moved yet."""
    if (before.waiting, before.counts, before.seen) != (after.waiting, after.counts, after.seen):
        return True
    return after.mark - before.mark > LATE_SECONDS


def _refusal(
    catalog: Catalog, tier: Tier, spec: ShadowSpec, row: RunRow, admitted: RunAdmitted, events: Sequence[Event]
) -> str:
    """Return the reason why a run gets no shadow; empty if it gets one."""
    is_excepted = row.tenant in spec.except_tenants or row.key in spec.except_keys
    if is_excepted or not admitted.shadow or admitted.preview:
        return "opted_out"
    if admitted.conductor == CALLER:
        return "own_plan"
    versions = {intent.version for intent in facts(events, CallIntended)}
    if admitted.served_by == spec.subject or (spec.conductor and spec.conductor in versions):
        return "served"
    if row.state == "cancelled":
        return "cancelled"
    shadow_tier = definition(catalog, tier, spec.subject)
    is_read_before = shadow_tier is not None and reader_before_approval(catalog, tier, shadow_tier)
    if is_read_before or lacks_approval(events):
        return "not_approved"
    return ""


def shadow_order(
    catalog: Catalog, tier: Tier, spec: ShadowSpec, row: RunRow, admitted: RunAdmitted, task: Task
) -> Order:
    """Return the order of the shadow of a run of this tier."""
    shadow_tier = definition(catalog, tier, spec.subject) or tier
    live_tier = tier_of(catalog, tier.name, admitted.model, admitted.served_by) or tier
    plan = None
    if spec.worker:
        plan = {"steps": [{"worker": spec.worker, "subtask": "", "access": ["user"]}]}
    effort = shadow_tier.effort
    if admitted.effort in shadow_tier.efforts:
        effort = admitted.effort
    wire = {}
    if spec.conductor:
        wire["conductor"] = spec.conductor
    once = hashlib.sha256(f"shadow\0{row.id}".encode()).hexdigest()
    return Order(
        task=task,
        tier=shadow_tier,
        model=shadow_tier.name,
        effort=effort,
        limits=_limits(shadow_tier.efforts[effort], live_tier.efforts.get(admitted.effort), admitted.limits),
        tenant=row.tenant,
        key=row.key,
        labels=admitted.labels,
        overrides=_overrides(shadow_tier, admitted),
        plan=plan,
        followed=False,
        preview=spec.mode == "plan" or bool(task.toolbox.tools),
        explore=admitted.explore,
        on_disconnect="finish",
        wire=wire,
        once=IdempotencyRecord(once, row.id.encode(), row.created_at + REMEMBERED_SECONDS, tenant=row.tenant),
        key_name=admitted.key_name,
        budgets=(shadow_budget(tier.name, spec.usd_per_day).id,),
        run=shadow_id(row.id),
        origin_kind="shadow",
        origin_run=row.id,
        approval=admitted.approval is not None and bool(admitted.approval.reasons),
    )


def _limits(own: Limits, usual: Limits | None, requested: Limits) -> Limits:
    """Return the limits of a shadow: its tier's own, lowered to those that the request of its origin has narrowed below
    the `usual` ones of what served it."""
    if usual is None:
        return own
    narrowed = {}
    for name in LIMITS:
        limit = getattr(requested, name)
        if limit < getattr(usual, name):
            narrowed[name] = min(getattr(own, name), limit)
    return replace(own, **narrowed)


def _overrides(shadow_tier: Tier, admitted: RunAdmitted) -> Overrides:
    """Return the overrides that deny the workers which the request of the origin has denied, or did not allow."""
    pool = frozenset(shadow_tier.pool)
    if {PINNED, NOT_ALLOWED}.isdisjoint(admitted.excluded.values()):
        denied = {name for name, reason in admitted.excluded.items() if reason == DENIED}
        return Overrides(deny=pool & denied)
    return Overrides(deny=pool.difference(admitted.pool))


def _has_reader(catalog: Catalog, order: Order) -> bool:
    """Return True if one of the shadow's workers may read what the workers of its origin may."""
    reading = Reading(order.labels, frozenset({CALLERS_WORDS}))
    return any(permits(catalog.workers[name], reading) for name in order.tier.pool)
