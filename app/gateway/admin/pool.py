"""`/admin/v1/workers`, `/policy` and `/conductors`: the pool in force, who may see what, and which versions conduct."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path

from app.core.pool.catalog import Catalog, Worker
from app.core.pool.conductor_versions import ChangeKind, Standing, standings
from app.core.pool.policy_change import labels_of, widenings
from app.core.pool.rules import Rule
from app.engine.conductors import changes
from app.errors import ConfigInvalid, Conflict, InvalidRequest, NotFound, Overloaded
from app.gateway.admin import replies
from app.gateway.admin.context import AdminContext
from app.gateway.admin.requests import CanaryRequest, NoFields, PoolRequest, VersionRequest, read
from app.gateway.admin.responses import as_json, page
from app.gateway.http.auth import Caller, Keys
from app.gateway.http.ingress import json_body
from app.gateway.openapi import operations
from app.gateway.wire.baton_options import WireModel

ConductorName = Annotated[str, Path(alias="conductor", description="The conductor's worker in the pool file.")]
CHANGES: tuple[tuple[str, ChangeKind, str], ...] = (
    ("canary", "canary", "Let a version conduct a share of the runs."),
    ("promote", "promoted", "Let a version conduct all runs."),
    ("rollback", "rolled_back", "End the canary, or go back to the version that was live before."),
)

BODIES: Mapping[ChangeKind, type[WireModel]] = {"canary": CanaryRequest, "promoted": VersionRequest}
"""The bodies of the changes that name a version."""


def routes(context: AdminContext, keys: Keys) -> APIRouter:
    """The routes of workers, policy and conductors."""
    router = APIRouter(prefix="/admin/v1", tags=["pool"])
    _workers(router, context, keys)
    _policy(router, context, keys)
    _difference(router, context, keys)
    _conductors(router, context, keys)
    for verb, kind, words in CHANGES:
        _conductor_change(router, context, keys, verb, kind, words)
    return router


def _workers(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    @router.get(
        "/workers",
        operation_id="list_workers",
        summary="List the workers with their measured state.",
        response_model=replies.WorkerList,
        responses=operations.replies(*operations.READING),
    )
    async def list_workers(caller: Annotated[Caller, keys.needs("workers:read")]) -> Any:
        """The workers of the pool file in force. Their state is what the engine of this process has measured."""
        catalog = context.gateway.catalog()
        return page([_worker(context, catalog, one) for one in catalog.workers.values()], "name", has_more=False)


def _worker(context: AdminContext, catalog: Catalog, worker: Worker) -> dict[str, Any]:
    return {
        "object": "worker",
        "name": worker.name,
        "provider": worker.provider,
        "model": worker.model,
        "tiers": [tier.name for tier in catalog.tiers.values() if worker.name in tier.pool],
        "region": worker.card.region,
        "retention": worker.card.retention,
        "clearance": sorted(worker.card.clearance),
        "rules": sorted(_rules_of(worker)),
        "state": context.state(worker) if context.state is not None else None,
    }


def _policy(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    @router.get(
        "/policy",
        operation_id="get_policy",
        summary="Show the rules in force.",
        response_model=replies.Policy,
        responses=operations.replies(*operations.READING),
    )
    async def get_policy(caller: Annotated[Caller, keys.needs("policy:read")]) -> Any:
        """Each rule of the pool file with the workers that it excludes."""
        catalog = context.gateway.catalog()
        rules = [_rule(catalog, rule) for rule in catalog.rules]
        labels = list(labels_of(catalog))
        return as_json({"object": "policy", "catalog": catalog.digest, "labels": labels, "rules": rules})


def _rule(catalog: Catalog, rule: Rule) -> dict[str, Any]:
    excluded = [one.name for one in catalog.workers.values() if rule.name in _rules_of(one)]
    return {"name": rule.name, "labels": sorted(rule.labels), "excludes": excluded}


def _rules_of(worker: Worker) -> frozenset[str]:
    return frozenset(bar.rule for bar in worker.bars)


def _difference(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    busy = asyncio.Lock()

    @router.post(
        "/policy/diff",
        operation_id="compare_policy",
        summary="Compare a pool file with the one in force.",
        response_model=replies.PolicyDifference,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("PoolRequest"),
    )
    async def compare_policy(
        caller: Annotated[Caller, keys.needs("policy:read")],
        given: Annotated[dict[str, object], json_body(context.gateway.bounds)],
    ) -> Any:
        """Proves that the file shows nothing to anybody who does not see it now, or gives a witness for each tier and
        recipient. It is only compared, never taken into force."""
        new = _read_pool(context, read(PoolRequest, given).pool)
        if busy.locked():
            raise Overloaded("Another pool file is being compared; try again shortly.", retry_after=1.0)
        async with busy:
            old = context.gateway.catalog()
            try:
                found = await asyncio.to_thread(lambda: list(widenings(old, new)))
            except ConfigInvalid as error:
                raise _unfit(error) from None
        witnesses = [asdict(one) for one in found]
        return as_json({"object": "policy.difference", "widens": bool(found), "witnesses": witnesses})


def _read_pool(context: AdminContext, text: str) -> Catalog:
    try:
        return context.read_pool(text)
    except ConfigInvalid as error:
        raise _unfit(error) from None


def _unfit(error: ConfigInvalid) -> InvalidRequest:
    return InvalidRequest(f"The pool file is not valid: {'; '.join(error.faults)}", param="pool", code="invalid_pool")


def _conductors(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    @router.get(
        "/conductors",
        operation_id="list_conductors",
        summary="List the versions of conductors.",
        response_model=replies.ConductorList,
        responses=operations.replies(*operations.READING),
    )
    async def list_conductors(caller: Annotated[Caller, keys.needs("conductors:read")]) -> Any:
        """For each conductor of the pool file the version in force, the canary, and the versions that are loaded."""
        known = standings(await context.gateway.store.changes())
        names = sorted(changes.conducted(context.gateway.catalog()))
        return page([_standing(name, known.get(name, Standing())) for name in names], "name", has_more=False)


def _conductor_change(
    router: APIRouter, context: AdminContext, keys: Keys, verb: str, kind: ChangeKind, words: str
) -> None:
    model = BODIES.get(kind, NoFields)

    @router.post(
        f"/conductors/{{conductor}}/{verb}",
        operation_id=f"{verb}_conductor",
        summary=words,
        response_model=replies.ConductorVersion,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body(model.__name__, required=model is not NoFields),
    )
    async def change_conductor(
        conductor: ConductorName,
        caller: Annotated[Caller, keys.needs("conductors:write")],
        given: Annotated[dict[str, object], json_body(context.gateway.bounds, optional=model is NoFields)],
    ) -> Any:
        """Engines follow within two seconds. The same rules hold as for `baton conductor`."""
        asked = read(model, given)
        if conductor not in changes.conducted(context.gateway.catalog()):
            raise NotFound("No tier of the pool file has this conductor.")
        wanted = changes.Wanted(conductor, kind, getattr(asked, "version", ""), getattr(asked, "share", 0.0))
        store = context.gateway.store
        try:
            checked = await changes.checked(store, wanted, lambda: context.versions(conductor))
        except ConfigInvalid as error:
            raise Conflict(
                f"The version cannot be changed: {'; '.join(error.faults)}.", code="change_refused"
            ) from None
        await changes.made(store, checked, name=context.gateway.name("change"), by=caller.actor)
        known = standings(await store.changes())
        return as_json(_standing(conductor, known.get(conductor, Standing())))


def _standing(name: str, now: Standing) -> dict[str, Any]:
    return {"object": "conductor", "name": name, **asdict(now)}
