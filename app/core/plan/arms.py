"""Arms: model ids that replace a tier's conductor by another one, so that any client can compare several over one tier.

    baton-ultra:single:WORKER ........... one worker answers alone
    baton-ultra:sc:5[:WORKER] ........... five answers of one worker (the tier's fallback), weighed by itself
    baton-ultra:moa:3[:A+B+C] ........... mixture of agents: three answers side by side, joined by the first worker
    baton-ultra:static:pev[:A+B+C] ...... the first worker plans, the second executes, the third verifies
    baton-ultra:conductor:WORKER ........ this model conducts
    baton-ultra:random .................. a random valid plan

An arm has its tier's workers, or those that it names, and its tier's limits; a shape that does not fit them is refused.
A run records the arm's whole id as its model, and its tier's name as its tier. Arms are there if the pool file says so.
"""

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from app.core.pool.catalog import Catalog, ConductorSpec, Limits, Tier
from app.core.pool.serving import serve_tier

MOST_BRANCHES = 16
"""The largest number of branches, as in a pool file."""
BRANCH_COUNTS = frozenset([str(count) for count in range(1, MOST_BRANCHES + 1)])
"""The numbers of branches as an arm's name writes them: without a sign, a space or a leading zero."""
ORACLE = "oracle"
"""The best arm of each task: known only when all have answered, so nobody can serve it."""


def tier_for(catalog: Catalog, model: str) -> Tier | None:
    """Return the tier that a model id means: one of the file's, by name or alias, or an arm of one, where arms are
    served."""
    file_tier = catalog.tier(model)
    if file_tier is not None or not catalog.evaluation.arms:
        return file_tier
    for name in sorted((*catalog.tiers, *catalog.aliases), key=len, reverse=True):
        tier = catalog.tier(name)
        if tier is not None and model.startswith(f"{name}:"):
            return _arm(catalog, tier, model[len(name) + 1 :])
    return None


def tier_of(catalog: Catalog, tier: str, model: str, served_by: str = "") -> Tier | None:
    """Return the tier of a run as it was admitted: with the arm's conductor if its model is one, or as the subject
    serves it (`serving.py`). None if the tier is gone; where the subject is gone, the tier's own definition counts."""
    own = catalog.tiers.get(tier)
    if own is not None and served_by:
        return serve_tier(catalog, own, served_by) or own
    arm_tier = tier_for(catalog, model) if model not in (tier, "") else None
    if arm_tier is not None and arm_tier.name == tier:
        return arm_tier
    return own


def is_arm(catalog: Catalog, model: str) -> bool:
    """Return True if a model id is that of an arm, and not a tier's own or an alias of it."""
    return bool(model) and catalog.tier(model) is None


def list_arm_ids(catalog: Catalog, tier: Tier) -> Iterator[str]:
    """Yield the model ids of a tier's arms: each kind once, for each worker or further conductor, as large as fits."""
    if not catalog.evaluation.arms:
        return
    steps = tier.efforts[tier.effort].steps
    yield from (f"{tier.name}:single:{worker}" for worker in tier.pool)
    if steps > 2:
        yield f"{tier.name}:sc:{min(5, steps - 1)}"
        yield f"{tier.name}:moa:{min(3, steps - 1)}"
        yield f"{tier.name}:static:pev"
    own = tier.conductor
    conductors = {name: None for name in (own.worker, *catalog.evaluation.conductors) if name is not None}
    for name in conductors:
        if (own.kind, own.worker) != ("model", name) and not _needs_approval(catalog, tier, name):
            yield f"{tier.name}:conductor:{name}"
    yield f"{tier.name}:random"


def steps_needed(spec: ConductorSpec) -> int:
    """Return the number of steps of a conductor's whole shape; 1 where it fits any limit."""
    if spec.kind != "fixed" or spec.shape == "single":
        return 1
    return 3 if spec.shape == "chain" else spec.width + 1


def _arm(catalog: Catalog, tier: Tier, arm: str) -> Tier | None:
    kind, _, argument = arm.partition(":")
    if kind == "random" and arm == kind:
        return _fix_conductor(tier, ConductorSpec("random"), tier.pool)
    if kind == "single":
        return _over(tier, [argument], "single")
    if kind == "conductor":
        return _use_model_as_conductor(catalog, tier, argument)
    count, _, names = argument.partition(":")
    workers = names.split("+") if names else tier.pool
    if kind == "static" and count == "pev":
        return _over(tier, workers, "chain")
    if count not in BRANCH_COUNTS:
        return None
    if kind == "sc":
        return _over(tier, [names or tier.fallback], "self_consistency", int(count))
    if kind != "moa":
        return None
    return _over(tier, workers, "fan_out", int(count))


def _over(tier: Tier, workers: list[str] | tuple[str, ...], shape: str, width: int = 3) -> Tier | None:
    """Return the tier with this shape over these workers and no others: nobody else is to answer in an arm's name."""
    names = tuple(workers)
    if not set(names) <= set(tier.pool):
        return None
    spec = ConductorSpec("fixed", shape=shape, workers=names, width=width, whole=True)  # type: ignore[arg-type]
    return _fix_conductor(tier, spec, tuple(dict.fromkeys(names)))


def _fix_conductor(tier: Tier, spec: ConductorSpec, pool: tuple[str, ...]) -> Tier:
    """Return the tier with this conductor and pool, and with one round: it would accept its own answer in any further
    one."""
    efforts: Mapping[str, Limits] = {name: replace(limits, rounds=1) for name, limits in tier.efforts.items()}
    fallback = tier.fallback if tier.fallback in pool else pool[0]
    return replace(tier, conductor=spec, pool=pool, fallback=fallback, efforts=efforts)


def _use_model_as_conductor(catalog: Catalog, tier: Tier, worker: str) -> Tier | None:
    """Return the tier with this model as its conductor: it conducts as it does for the tier whose conductor it is, if
    there is one, else as this tier's own does. It reads the task, so it is not just any worker."""
    own = tier.conductor
    may_conduct = worker in {*tier.pool, own.worker, *catalog.evaluation.conductors}
    if not may_conduct or _needs_approval(catalog, tier, worker):
        return None
    for known_tier in (tier, *catalog.tiers.values()):
        conductor = known_tier.conductor
        if conductor.kind == "model" and conductor.worker == worker:
            return replace(tier, conductor=conductor)
    if own.kind != "model":
        own = ConductorSpec("model")
    return replace(tier, conductor=replace(own, worker=worker))


def _needs_approval(catalog: Catalog, tier: Tier, worker: str) -> bool:
    """Return True if the tier has somebody approve a plan before this worker is called: as a conductor it would read
    the task before there is a plan."""
    return tier.approval is not None and tier.approval.names(catalog.workers[worker])
