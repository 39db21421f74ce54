"""Those who run the service: the pool files that they have it read again, and the persons who decide on plans."""

from collections.abc import Mapping
from functools import cache
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from app.core.pool.catalog import (
    ApprovalRule,
    Card,
    Catalog,
    ConductorSpec,
    Limits,
    Price,
    ProviderSpec,
    Tier,
    Worker,
)
from app.core.pool.snapshot import seal_catalog
from tests.simulation.workers import PLANNER

POOL = ("ada", "bob", "cyd")
SHAPES = ("single", "chain", "fan_out", "self_consistency")
GATED = "-gated"
"""The end of the name of a tier's twin, whose plans need an approval before ada is called or much is spent."""
APPROVAL_WAIT = 6.0
"""Seconds for which a plan waits for an approval."""
GATE_MICRO_USD = 2_000


@cache
def usual_pool() -> Catalog:
    """Three workers, one that conducts, and a tier for each way to plan, with its twin."""
    card = Card(max_output=2_000, tools=True)
    cleared, phi = replace(card, clearance=frozenset({"phi"})), frozenset({"phi"})
    workers = {
        name: Worker(name, "sim", name, Price(place * 1_000_000, place * 4_000_000, 500_000), card)
        for place, name in enumerate((*POOL, PLANNER), 1)
    }
    workers["ada"] = replace(workers["ada"], card=cleared)
    for name in ("cyd", PLANNER):
        workers[name] = replace(workers[name], card=cleared, declassifies=phi)
    efforts = {"medium": Limits(rounds=3, depth=2)}
    asks = ApprovalRule(seconds=APPROVAL_WAIT, four_eyes=False)
    gate = replace(asks, workers=("ada",), above_usd=GATE_MICRO_USD, on_expiry="fallback-plan")
    conductors = {name: ConductorSpec("fixed", shape=name) for name in SHAPES}
    conductors["model"] = ConductorSpec("model", worker=PLANNER)
    tiers: dict[str, Tier] = {}
    for name, conductor in conductors.items():
        tiers[name] = Tier(name, POOL, conductor, "bob", efforts, approval=asks)
    for name, conductor in conductors.items():
        tiers[name + GATED] = Tier(name + GATED, POOL, conductor, "bob", efforts, approval=gate)
    endpoint = ProviderSpec("sim", "rehearsal", options={"positional": "true"})
    return seal_catalog(Catalog({"sim": endpoint}, workers, tiers, {}, ""))


@cache
def pool_files() -> tuple[Catalog, ...]:
    """Return the files that the pool file is replaced by: each differs from the usual one in one thing."""
    usual = usual_pool()
    workers, tiers = usual.workers, usual.tiers
    uncleared = {name: replace(workers[name], card=workers["bob"].card) for name in ("ada", "cyd")}
    narrow = {"medium": Limits(steps=2, fan_out=1, rounds=1, depth=0, attempts=1, output_tokens=100, seconds=10.0)}
    chain = ConductorSpec("fixed", shape="chain")
    files = [
        _without(usual, "cyd", fallback="bob"),
        _without(usual, "bob", fallback="ada"),
        replace(usual, workers={**workers, "ada": replace(workers["ada"], model="ada-2")}),
        replace(usual, workers={**workers, "bob": replace(workers["bob"], price=workers["cyd"].price)}),
        replace(usual, workers={**workers, **uncleared}),
        replace(usual, tiers={name: replace(tier, efforts=narrow) for name, tier in tiers.items()}),
        replace(usual, tiers={name: tier for name, tier in tiers.items() if not name.startswith(("chain", "model"))}),
        replace(usual, tiers={name: replace(tier, conductor=chain) for name, tier in tiers.items()}),
    ]
    return tuple(map(seal_catalog, files))


def _without(usual: Catalog, gone: str, *, fallback: str) -> Catalog:
    """Return the pool file without a worker."""
    workers = {name: worker for name, worker in usual.workers.items() if name != gone}
    pool = tuple(name for name in POOL if name != gone)
    tiers = {name: replace(tier, pool=pool, fallback=fallback) for name, tier in usual.tiers.items()}
    return replace(usual, workers=workers, tiers=tiers)


def catalogs_by_digest() -> Mapping[str, Catalog]:
    """Return all pool files of a world, by the digests that journals name."""
    return {catalog.digest: catalog for catalog in (usual_pool(), *pool_files())}


Verdict = Literal["approve", "refuse"]


class DecisionRequest(Struct):
    """What somebody has said on a plan that waits, and what came of it. `digest` is what they mean to decide on."""

    run: str
    question: int
    """The number of the event that asked."""
    verdict: Verdict
    digest: str
    by: str
    replacements: tuple[str, ...] = ()
    max_usd: int | None = None
    patience: int = 3
    """How often it is sent again where nobody answers."""
    accepted: bool = False
    refused: str = ""
    """The error that it was answered with."""
