"""`/admin/v1/workers` and `/conductors`: the pool in force, and which versions conduct."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path

from app.core.pool.catalog import Catalog, Worker
from app.core.pool.conductor_versions import ChangeKind, Standing, standings
from app.engine.conductors import changes, watch
from app.errors import ConfigInvalid, Conflict, NotFound
from app.gateway.admin import replies
from app.gateway.admin.context import AdminContext
from app.gateway.admin.requests import CanaryRequest, NoFields, PromotionRequest, read
from app.gateway.admin.responses import as_json, page
from app.gateway.http.api_keys import Caller
from app.gateway.http.auth import Keys
from app.gateway.http.ingress import json_body
from app.gateway.openapi import operations
from app.gateway.wire.baton_options import WireModel

ConductorName = Annotated[str, Path(alias="conductor", description="The conductor's worker in the pool file.")]
CHANGES: tuple[tuple[str, ChangeKind, str], ...] = (
    ("canary", "canary", "Let a version conduct a share of the runs."),
    ("promote", "promoted", "Let a version conduct all runs."),
    ("rollback", "rolled_back", "End the canary, or go back to the version that was live before."),
)

BODIES: Mapping[ChangeKind, type[WireModel]] = {"canary": CanaryRequest, "promoted": PromotionRequest}
"""The bodies of the changes that name a version."""


def routes(context: AdminContext, keys: Keys) -> APIRouter:
    """The routes of workers and conductors."""
    router = APIRouter(prefix="/admin/v1", tags=["pool"])
    _workers(router, context, keys)
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
        "rules": sorted({bar.rule for bar in worker.bars}),
        "state": context.state(worker) if context.state is not None else None,
    }


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
            note = await _evidence(context, checked, getattr(asked, "force", None))
        except ConfigInvalid as error:
            raise Conflict(
                f"The version cannot be changed: {'; '.join(error.faults)}.", code="change_refused"
            ) from None
        await changes.made(store, checked, name=context.gateway.name("change"), by=caller.actor, note=note)
        known = standings(await store.changes())
        return as_json(_standing(conductor, known.get(conductor, Standing())))


async def _evidence(context: AdminContext, wanted: changes.Wanted, forced: str | None) -> str:
    """The note of a change. Raises `ConfigInvalid` for a promotion whose conditions do not hold."""
    gateway = context.gateway
    found = await watch.gate(gateway.store, gateway.catalog(), wanted, gateway.now())
    if not watch.held(found) and not forced:
        raise ConfigInvalid(watch.refusals(found))
    return watch.note(found, forced=forced)


def _standing(name: str, now: Standing) -> dict[str, Any]:
    return {"object": "conductor", "name": name, **asdict(now)}
