"""`/admin/v1/workers`, `/conductors` and `/tiers`: the pool in force, which versions conduct, and what serves tiers."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Path, Query
from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response

from app.core.pool.catalog import Catalog, Worker
from app.core.pool.conductor_versions import ChangeKind, VersionsInForce, versions_in_force
from app.core.pool.serving import TIER, objection, subject_named
from app.engine.conductors import versions, watch
from app.errors import ConfigInvalid, Conflict, InvalidRequest, NotFound
from app.gateway.admin import replies
from app.gateway.admin.context import AdminContext
from app.gateway.admin.requests import (
    CanaryRequest,
    EvidenceFilters,
    NoFields,
    PromotionRequest,
    SubjectFilters,
    SubjectRequest,
    TierCanaryRequest,
    TierPromotionRequest,
    read,
)
from app.gateway.admin.responses import whole_list
from app.gateway.http.bodies import json_body
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.idempotency import Idempotency
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import operations
from app.gateway.wire.parameters import WireModel

ConductorName = Annotated[str, Path(alias="conductor", description="The conductor's worker in the pool file.")]
TierName = Annotated[str, Path(alias="tier", description="A tier of the pool file.")]


class Verb(NamedTuple):
    """A change of the version that conducts, or of what serves a tier."""

    name: str
    kind: ChangeKind
    words: str
    body: type[WireModel] = NoFields


CHANGES = (
    Verb("canary", "canary", "Let a version conduct a share of the runs.", CanaryRequest),
    Verb("promote", "promoted", "Let a version conduct all runs.", PromotionRequest),
    Verb("rollback", "rolled_back", "End the canary, or go back to the version that was live before."),
)
TIER_CHANGES = (
    Verb("canary", "canary", "Let another tier or a worker serve a share of a tier's runs.", TierCanaryRequest),
    Verb("promote", "promoted", "Let another tier or a worker serve all of a tier's runs.", TierPromotionRequest),
    Verb("rollback", "rolled_back", "End the canary, or go back to what served the tier before."),
)


def routes(context: AdminContext, keys: Keys, idempotency: Idempotency) -> APIRouter:
    """Return the routes of workers, conductors and tiers."""
    router = APIRouter(prefix="/admin/v1", tags=["pool"])
    _add_worker_routes(router, context, keys)
    _add_conductor_routes(router, context, keys)
    for verb in CHANGES:
        _add_conductor_change(router, context, keys, idempotency, verb)
    _add_tier_routes(router, context, keys)
    for verb in TIER_CHANGES:
        _add_tier_change(router, context, keys, idempotency, verb)
    return router


def _add_worker_routes(router: APIRouter, context: AdminContext, keys: Keys) -> None:
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
        return whole_list([_worker(context, catalog, worker) for worker in catalog.workers.values()])


def _worker(context: AdminContext, catalog: Catalog, worker: Worker) -> dict[str, Any]:
    state = None
    if context.state is not None:
        state = context.state(worker)
    return {
        "object": "worker",
        "name": worker.name,
        "provider": worker.provider,
        "model": worker.model,
        "tiers": [tier.name for tier in catalog.tiers.values() if worker.name in tier.pool],
        "region": worker.card.region,
        "retention": worker.card.retention,
        "clearance": sorted(worker.card.clearance),
        "rules": sorted({rule.name for rule in worker.excluding_rules}),
        "state": state,
    }


def _add_conductor_routes(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    @router.get(
        "/conductors",
        operation_id="list_conductors",
        summary="List the versions of conductors.",
        response_model=replies.ConductorList,
        responses=operations.replies(*operations.READING),
    )
    async def list_conductors(caller: Annotated[Caller, keys.needs("conductors:read")]) -> Any:
        """For each conductor of the pool file the version in force, the canary, and the versions that are loaded."""
        in_force = versions_in_force(await context.gateway.store.changes())
        names = sorted(versions.conductor_names(context.gateway.catalog()))
        return whole_list([_conductor_to_json(name, in_force.get(name, VersionsInForce())) for name in names])

    @router.get(
        "/conductors/{conductor}/evidence",
        operation_id="get_evidence",
        summary="Show what speaks for a promotion.",
        response_model=replies.PromotionEvidence,
        responses=operations.replies(*operations.READING),
    )
    async def get_evidence(
        conductor: ConductorName,
        filters: Annotated[EvidenceFilters, Query()],
        caller: Annotated[Caller, keys.needs("conductors:write")],
    ) -> Any:
        """The conditions of each tier that the conductor plans for, and whether they hold for a version now. The runs
        of all tenants are the evidence, so it is for callers of all tenants, as a promotion is."""
        gateway = context.gateway
        if conductor not in versions.conductor_names(gateway.catalog()):
            raise NotFound("No tier of the pool file has this conductor.")
        in_force = versions_in_force(await gateway.store.changes()).get(conductor, VersionsInForce())
        if filters.version not in in_force.loaded:
            words = "It is no version that is loaded; GET /admin/v1/conductors lists them."
            raise InvalidRequest(words, param="version", code="invalid_value")
        tiers = await _judge_tiers(gateway, versions.RequestedChange(conductor, "promoted", filters.version))
        return json_reply(
            {"object": "conductor.evidence", "name": conductor, "version": filters.version, "tiers": tiers}
        )


async def _judge_tiers(gateway: GatewayContext, change: versions.RequestedChange) -> list[dict[str, Any]]:
    evidence = await watch.gate(gateway.store, gateway.catalog(), change)
    return [tier.decision() | {"promotable": watch.may_be_promoted((tier,))} for tier in evidence]


def _add_tier_routes(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    @router.get(
        "/tiers",
        operation_id="list_tiers",
        summary="List what serves the tiers.",
        response_model=replies.TierServiceList,
        responses=operations.replies(*operations.READING),
    )
    async def list_tiers(caller: Annotated[Caller, keys.needs("conductors:read")]) -> Any:
        """For each tier of the pool file what serves its runs, its own definition or a subject, and the canary."""
        catalog = context.gateway.catalog()
        in_force = versions_in_force(await context.gateway.store.changes())
        return whole_list([_tier_to_json(catalog, name, in_force) for name in sorted(catalog.tiers)])

    @router.get(
        "/tiers/{tier}/evidence",
        operation_id="get_tier_evidence",
        summary="Show what speaks for putting a subject in a tier's place.",
        response_model=replies.TierServiceEvidence,
        responses=operations.replies(*operations.READING),
    )
    async def get_tier_evidence(
        tier: TierName,
        filters: Annotated[SubjectFilters, Query()],
        caller: Annotated[Caller, keys.needs("conductors:write")],
    ) -> Any:
        """The conditions of the tier's promotion, and whether they hold for a subject now. The runs of all tenants are
        the evidence, so it is for callers of all tenants, as a promotion is."""
        catalog = context.gateway.catalog()
        _check_tier(catalog, tier)
        subject = subject_named(catalog, filters.subject)
        if reason := objection(catalog, tier, subject):
            raise InvalidRequest(f"It cannot serve this tier: {reason}.", param="subject", code="invalid_value")
        tiers = await _judge_tiers(context.gateway, versions.RequestedChange(f"{TIER}{tier}", "promoted", subject))
        return json_reply({"object": "tier.evidence", "name": tier, "subject": subject, "tiers": tiers})


def _check_tier(catalog: Catalog, tier: str) -> None:
    if tier not in catalog.tiers:
        raise NotFound("The pool file has no tier of this name.")


def _add_conductor_change(
    router: APIRouter, context: AdminContext, keys: Keys, idempotency: Idempotency, verb: Verb
) -> None:
    kind, model = verb.kind, verb.body

    @router.post(
        f"/conductors/{{conductor}}/{verb.name}",
        operation_id=f"{verb.name}_conductor",
        summary=verb.words,
        response_model=replies.ConductorVersion,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body(model.__name__, required=model is not NoFields),
    )
    async def change_conductor(
        request: Request,
        conductor: ConductorName,
        caller: Annotated[Caller, keys.needs("conductors:write")],
        body: Annotated[dict[str, object], json_body(context.gateway.bounds, optional=model is NoFields)],
    ) -> Any:
        """Engines follow within two seconds. The same rules hold as for `baton conductor`. With an `Idempotency-Key`
        the same request changes it once."""
        change_request = read(model, body)
        if conductor not in versions.conductor_names(context.gateway.catalog()):
            raise NotFound("No tier of the pool file has this conductor.")
        store = context.gateway.store
        requested_change = versions.RequestedChange(
            conductor, kind, getattr(change_request, "version", ""), getattr(change_request, "share", 0.0)
        )
        check = partial(
            versions.check_change,
            store,
            requested_change,
            lambda: context.versions(conductor),
            context.trusted,
            partial(_warn, context),
        )

        change_id = idempotency.name("change", request, caller, body)

        async def change() -> Response:
            await _make_change(context, check, change_id, getattr(change_request, "force", None), caller)
            in_force = versions_in_force(await store.changes())
            return json_reply(_conductor_to_json(conductor, in_force.get(conductor, VersionsInForce())))

        return await idempotency.reply(request, caller, body, change)


def _add_tier_change(
    router: APIRouter, context: AdminContext, keys: Keys, idempotency: Idempotency, verb: Verb
) -> None:
    kind, model = verb.kind, verb.body

    @router.post(
        f"/tiers/{{tier}}/{verb.name}",
        operation_id=f"{verb.name}_tier",
        summary=verb.words,
        response_model=replies.TierService,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body(model.__name__, required=model is not NoFields),
    )
    async def change_tier(
        request: Request,
        tier: TierName,
        caller: Annotated[Caller, keys.needs("conductors:write")],
        body: Annotated[dict[str, object], json_body(context.gateway.bounds, optional=model is NoFields)],
    ) -> Any:
        """Gateways follow within two seconds; callers go on naming the tier. The same rules hold as for `baton tier`.
        With an `Idempotency-Key` the same request changes it once."""
        change_request, store, catalog = read(model, body), context.gateway.store, context.gateway.catalog()
        _check_tier(catalog, tier)
        subject = ""
        if isinstance(change_request, SubjectRequest):
            subject = subject_named(catalog, change_request.subject)
        requested_change = versions.RequestedChange(
            f"{TIER}{tier}", kind, subject, getattr(change_request, "share", 0.0)
        )
        check = partial(versions.check_service, store, catalog, requested_change)

        change_id = idempotency.name("change", request, caller, body)

        async def change() -> Response:
            await _make_change(context, check, change_id, getattr(change_request, "force", None), caller)
            return json_reply(_tier_to_json(catalog, tier, versions_in_force(await store.changes())))

        return await idempotency.reply(request, caller, body, change)


async def _make_change(
    context: AdminContext,
    check: Callable[[], Awaitable[versions.RequestedChange]],
    change_id: str,
    force_reason: str | None,
    caller: Caller,
) -> None:
    """Make the change that `check` finds possible. Raises `Conflict` if it is not, and if one of this id was made."""
    try:
        change = await check()
        note = await _note_of_change(context, change, force_reason)
    except ConfigInvalid as error:
        raise Conflict(f"The change is refused: {'; '.join(error.faults)}.", code="change_refused") from None
    if not await versions.make_change(context.gateway.store, change, name=change_id, by=caller.actor, note=note):
        raise Conflict("A request with this Idempotency-Key has made this change already.", code="change_made")


def _warn(context: AdminContext, objection: str) -> None:
    context.gateway.telemetry.log(
        logging.WARNING, "A version without a trusted signature is put into force.", reason=objection
    )


async def _note_of_change(context: AdminContext, change: versions.RequestedChange, force_reason: str | None) -> str:
    """Return the note of a change. Raises `ConfigInvalid` for a promotion whose conditions do not hold."""
    gateway = context.gateway
    evidence = await watch.gate(gateway.store, gateway.catalog(), change)
    if not watch.may_be_promoted(evidence) and not force_reason:
        raise ConfigInvalid(watch.refusals(evidence))
    return watch.evidence_note(evidence, forced=force_reason)


def _tier_to_json(catalog: Catalog, tier: str, in_force: Mapping[str, VersionsInForce]) -> dict[str, Any]:
    current = in_force.get(f"{TIER}{tier}", VersionsInForce())
    fields = {name: value for name, value in asdict(current).items() if name != "loaded"}
    missing = versions.missing_subjects(catalog, {f"{TIER}{tier}": current})
    return {"object": "tier", "name": tier, **fields, "missing": missing}


def _conductor_to_json(name: str, current: VersionsInForce) -> dict[str, Any]:
    return {"object": "conductor", "name": name, **asdict(current)}
