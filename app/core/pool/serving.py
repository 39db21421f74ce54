"""Rules about what serves a tier: its own definition in the pool file, or a *subject* in its place. Pure.

A subject is another tier (`tier baton-next`), whose pool and conductor then plan and answer, or one worker that answers
alone (`worker old-gpt`). A shadow tries a subject; an operator's change puts it in the tier's place, for a share of the
runs or for all of them. Changes of what serves a tier stand in the same log as those of conductors' versions
(`conductor_versions.py`), under the name `tier NAME`, and their versions are subjects. No worker's name has a space.

Callers still name the tier, and its limits, its approvals and the keys that may use it stay those of the tier.
"""

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from app.core.pool.catalog import LIMITS, Catalog, ConductorSpec, Limits, Tier

TIER: Final = "tier "
WORKER: Final = "worker "
"""The prefixes of the names of subjects, one for each kind."""


def tier_in(changed: str) -> str:
    """Return the tier whose service a change is about; empty for a change of a conductor's version."""
    if changed.startswith(TIER):
        return changed.removeprefix(TIER)
    return ""


def subject_named(catalog: Catalog, name: str) -> str:
    """Return the subject that an operator means: one in full, or else the tier of this name, or else the worker."""
    if name.startswith((TIER, WORKER)):
        return name
    return f"{TIER}{name}" if name in catalog.tiers or name not in catalog.workers else f"{WORKER}{name}"


def objection(catalog: Catalog, tier: str, subject: str) -> str:
    """Return the reason why a subject cannot serve a tier of the pool file; empty if it can."""
    if subject == f"{TIER}{tier}":
        return f"{subject} is the tier itself; `baton tier rollback {tier}` lets its own definition serve again"
    kind, _, name = subject.partition(" ")
    worker = catalog.workers.get(name) if kind == "worker" else None
    if worker is not None and catalog.providers[worker.provider].format == "embeddings":
        return f"the worker {name} makes embeddings and cannot answer; name another one"
    other = definition(catalog, catalog.tiers[tier], subject)
    if other is None:
        others = ", ".join(name for name in catalog.tiers if name != tier)
        return f"the pool file has no {subject}; its other tiers are: {others or 'none'}"
    reader = reader_before_approval(catalog, catalog.tiers[tier], other)
    if reader:
        return f"{reader}, which reads its tasks before a plan can be approved, is named by the approval of {tier}"
    return ""


def definition(catalog: Catalog, tier: Tier, subject: str) -> Tier | None:
    """Return the pool, the conductor and the limits that a subject stands for: those of another tier, or this tier with
    one worker that answers alone. None if the pool file does not have it."""
    if subject.startswith(TIER):
        return catalog.tiers.get(subject.removeprefix(TIER))
    name = subject.removeprefix(WORKER)
    if not subject.startswith(WORKER) or name not in catalog.workers:
        return None
    alone = ConductorSpec("fixed", workers=(name,))
    efforts: Mapping[str, Limits] = {level: replace(limits, rounds=1) for level, limits in tier.efforts.items()}
    return replace(tier, pool=(name,), conductor=alone, fallback=name, efforts=efforts)


def definition_of(catalog: Catalog, tier: str, subject: str) -> Tier | None:
    """Return the definition by which a tier is served: its own, or that of a subject. None if the pool file does not
    have the tier, or the subject."""
    own = catalog.tiers.get(tier)
    if own is None or not subject:
        return own
    return definition(catalog, own, subject)


def serve_tier(catalog: Catalog, tier: Tier, subject: str) -> Tier | None:
    """Return the tier as it is while the subject serves it: under its own name and with its own levels of effort,
    within the limits of both. None if the pool file does not have the subject, or if somebody whom the tier's approval
    names would read the task before."""
    other = definition(catalog, tier, subject)
    if other is None or reader_before_approval(catalog, tier, other):
        return None
    usual = other.efforts[other.effort]
    efforts = {level: within(limits, other.efforts.get(level, usual)) for level, limits in tier.efforts.items()}
    return replace(
        tier,
        pool=other.pool,
        conductor=other.conductor,
        fallback=other.fallback,
        efforts=efforts,
        approval=tier.approval or other.approval,
        served_by=subject,
    )


def reader_before_approval(catalog: Catalog, tier: Tier, other: Tier) -> str:
    """Return a worker that the tier's approval names and that would read its tasks before there is a plan to approve,
    because it conducts or makes embeddings for the other definition; empty if there is none."""
    readers = [other.conductor.worker]
    if other.conductor.selector is not None:
        readers.append(other.conductor.selector.embedder)
    for name in readers:
        if name is not None and tier.approval is not None and tier.approval.names(catalog.workers[name]):
            return name
    return ""


def within(limits: Limits, others: Limits) -> Limits:
    """Return the lower of each two limits."""
    return Limits(**{name: min(getattr(limits, name), getattr(others, name)) for name in LIMITS})
