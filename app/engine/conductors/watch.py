"""The gate of a promotion, and the watch over canaries and promotions that rolls back what breaches its conditions.

Both are the same for versions of a conductor and for what serves a tier. Conditions stand in the pool file
(`[tiers.NAME.promotion]`). Without any for a conductor's tiers, or for the tier, everything is as an operator decides.
"""

import asyncio
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from app.core.pool.catalog import Catalog, Tier
from app.core.pool.conductor_versions import VersionsInForce, history_of, versions_in_force
from app.core.pool.serving import TIER, definition_of, tier_in
from app.core.rating.promotion import Condition, breaches, conditions, is_promotable
from app.engine.conductors import versions
from app.engine.conductors.trials import (
    Candidate,
    Judgement,
    PresentDefinitions,
    canary_of,
    compare_versions,
    judge,
    promotion_of,
    subject_of,
)
from app.engine.conductors.versions import RequestedChange
from app.engine.context import EngineContext, Leadership
from app.engine.periodic import look_repeatedly
from app.store.protocol import PROCESS, Store

EVERY_SECONDS = 60.0
"""Seconds between two looks. A look reads the journals of at most 2,000 runs of a tier for each candidate."""
CLAIM_SECONDS = 3 * EVERY_SECONDS
CLAIM: Final = "promotion watch"
EVIDENCE_SECONDS: Final = 30 * 86_400.0
"""The age up to which shadows count as evidence for a promotion."""


def tiers_with_conditions(catalog: Catalog, in_force: Mapping[str, VersionsInForce], conductor: str) -> list[Tier]:
    """Return the tiers that state conditions, of those whose runs this model conducts, alone or as one of a selector's
    choices, in their own definitions or in those that serve them instead; for `tier NAME` only that tier."""
    named = tier_in(conductor)
    found = []
    for tier in catalog.tiers.values():
        if named:
            is_meant = tier.name == named
        else:
            live = in_force.get(f"{TIER}{tier.name}", VersionsInForce()).live
            served = definition_of(catalog, tier.name, live) or tier
            is_meant = conductor in (tier.conductor.worker, served.conductor.worker)
        if is_meant and tier.promotion is not None:
            found.append(tier)
    return found


async def gate(store: Store, catalog: Catalog, wanted: RequestedChange) -> tuple[Judgement, ...]:
    """Judge a promotion by the conditions of each tier that it concerns; nothing for another change. The time is that
    of the database's clock, by which changes are ordered: an operator's own may be wrong."""
    if wanted.kind != "promoted":
        return ()
    changes = await store.changes()
    tiers = tiers_with_conditions(catalog, versions_in_force(changes), wanted.conductor)
    if not tiers:
        return ()
    history = history_of(changes, wanted.conductor)
    now = await store.clock()
    since = now - EVIDENCE_SECONDS
    subject = subject_of(wanted.conductor, wanted.version)
    judgements = []
    for tier in tiers:
        judgement = await judge(store, catalog, tier, subject, canary_of(history), since, now)
        if judgement is not None:
            judgements.append(judgement)
    return tuple(judgements)


def refusals(judgements: Sequence[Judgement]) -> list[str]:
    """Return the conditions that do not hold, each as a sentence."""
    reasons = []
    for judgement in judgements:
        for condition in judgement.conditions:
            if condition.outcome != "holds":
                reasons.append(f"{judgement.tier}: {condition.name} {_explanation(condition)}")
        if judgement.left_out:
            reasons.append(f"{judgement.tier}: {left_out_words(judgement.left_out)}")
    return reasons


def left_out_words(count: int) -> str:
    """Return how many comparisons with shadows are no evidence any more, and why."""
    why = "a canary served the run, or what is live or the pool file has changed what was compared"
    return f"{count} comparisons are left out, because {why}"


def _explanation(condition: Condition) -> str:
    if condition.name == "min_pairs":
        return f"is {condition.limit:.0f}, and there are {condition.count}"
    if condition.found is None:
        return f"is {condition.limit:g}, and nothing is known of it"
    found = condition.found
    if math.isinf(found.value):
        return f"is {condition.limit:g}, and what is live costs nothing"
    words = f"is {condition.limit:g}, and {found.value:.4f} was found"
    if math.isinf(found.low) and math.isinf(found.high):
        words += ", of too few users to say more"
    else:
        words += f", between {found.low:.4f} and {found.high:.4f}"
    if condition.outcome == "open" and condition.needed is not None:
        words += f"; about {condition.needed:,} comparisons decide"
    return words


def may_be_promoted(judgements: Sequence[Judgement]) -> bool:
    """Return True if a promotion may be made."""
    return all(is_promotable(judgement.conditions) for judgement in judgements)


def evidence_note(judgements: Sequence[Judgement], **more: Any) -> str:
    """Return the evidence of a decision, with those of the further fields that are not empty, as JSON that is stored
    with the change; empty where there is nothing to store."""
    note: dict[str, Any] = {name: value for name, value in more.items() if value}
    if not judgements and not note:
        return ""
    note["tiers"] = [judgement.decision() for judgement in judgements]
    return orjson.dumps(note).decode()


class PromotionWatch:
    """The task of an engine that rolls back. One engine of the service does so at a time."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._leadership = Leadership(context, CLAIM, CLAIM_SECONDS)

    async def run(self, stopping: asyncio.Event) -> None:
        """Look until `stopping` is set."""
        await look_repeatedly(self.look, stopping, EVERY_SECONDS, self._context.telemetry, "The watch over promotions")

    async def look(self) -> None:
        """Judge each canary, and each recent promotion, once, unless another engine does."""
        catalog = self._context.catalog()
        tier_subjects = [f"{TIER}{name}" for name in catalog.tiers]
        names = sorted([*versions.conductor_names(catalog), *tier_subjects])
        has_conditions = any(tier.promotion for tier in catalog.tiers.values())
        if not has_conditions or not self._context.clock_is_set():
            return
        if not await self._leadership.acquire():
            return
        changes = await self._context.store.changes()
        in_force = versions_in_force(changes)
        definitions = PresentDefinitions(self._context.store, catalog)
        for conductor in names:
            tiers = tiers_with_conditions(catalog, in_force, conductor)
            if not tiers:
                continue
            history = history_of(changes, conductor)
            for candidate in (canary_of(history), promotion_of(history)):
                if candidate is not None:
                    await self._judge(catalog, definitions, candidate, tiers)

    async def _judge(
        self, catalog: Catalog, definitions: PresentDefinitions, candidate: Candidate, tiers: Sequence[Tier]
    ) -> None:
        store, now = self._context.store, self._context.now()
        for tier in tiers:
            spec = tier.promotion
            if spec is None:
                continue
            source = "canary"
            if candidate.promoted:
                source = "promotion"
                if now - candidate.since > spec.watch_hours * 3_600:
                    continue
            evidence = await compare_versions(store, catalog, tier, candidate, now, definitions)
            judgement = Judgement(tier.name, source, evidence, conditions(spec, evidence))
            breached = breaches(judgement.conditions)
            if breached:
                return await self._roll_back(candidate, judgement, breached)

    async def _roll_back(self, candidate: Candidate, judgement: Judgement, breached: Sequence[Condition]) -> None:
        """Undo what the candidate was given. The id of the change follows from the candidate, so that it is undone once
        at most, whatever several engines find."""
        context = self._context
        identity = f"{candidate.conductor}|{candidate.version}|{candidate.since!r}|{candidate.promoted!r}"
        name = f"change_{hashlib.sha256(identity.encode()).hexdigest()[:24]}"
        in_force = versions_in_force(await context.store.changes()).get(candidate.conductor, VersionsInForce())
        present = in_force.canary
        if candidate.promoted:
            present = in_force.live
        if candidate.version != present:  # somebody has changed it meanwhile
            return
        wanted = RequestedChange(candidate.conductor, "rolled_back", candidate.version)
        names = [condition.name for condition in breached]
        evidence = evidence_note([judgement], breached=names)
        if not await versions.make_change(context.store, wanted, name=name, by=PROCESS, note=evidence):
            return
        for name in names:
            context.telemetry.count("baton_rollbacks_total", candidate.conductor, name)
        context.telemetry.log(
            logging.ERROR,
            "What was promoted, or is a canary, breached the conditions of its promotion and was rolled back.",
            worker=candidate.conductor,
            versions=candidate.version,
            tier=judgement.tier,
            reason=", ".join(names),
        )
