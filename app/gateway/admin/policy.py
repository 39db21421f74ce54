"""`/admin/v1/policy`: the rules in force, and what another pool file would change: who is shown what, and past runs.

A posted file is only read and compared, never taken into force. One file is looked at after the other: the space of
labels may be large.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter

from app.core.pool import policy_table
from app.core.pool.catalog import Catalog, Worker
from app.core.pool.policy_change import MOST_LABELS, Widening, labels_of, recipients, widenings
from app.core.pool.rules import Rule
from app.core.run.policy_trial import PolicyTrial, find_refused_calls
from app.errors import ConfigInvalid, EventMalformed, InvalidRequest, NotFound, Overloaded
from app.gateway.admin import replies
from app.gateway.admin.context import AdminContext
from app.gateway.admin.requests import PoolRequest, TrialRequest, read
from app.gateway.http.bodies import json_body
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import operations
from app.store.protocol import RunQuery, TenantStore
from app.store.run_pages import run_pages

MOST_RUNS = 1_000
"""The most past runs to which a file is applied, the newest."""
MOST_DECISIONS = 4_000_000
"""The most decisions that a comparison may take: half a minute, roughly. No request can stop it once it is begun."""
MOST_CELLS = 100_000
"""The most pairs of a set of labels and a recipient in one table, some megabytes of JSON."""
PAGE = 100
T = TypeVar("T")


def routes(context: AdminContext, keys: Keys) -> APIRouter:
    """Return the routes of the policy."""
    router = APIRouter(prefix="/admin/v1/policy", tags=["policy"])
    reader = PoolFileReader()
    _add_read_route(router, context, keys)
    _add_check_route(router, context, keys, reader)
    _add_difference_route(router, context, keys, reader)
    _add_trial_route(router, context, keys, reader)
    return router


class PoolFileReader:
    """Works on pool files, one after the other, and off the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which runs on a thread. Raises `Overloaded` while other work goes on, and
        `InvalidRequest` for a faulty file."""
        if self._lock.locked():
            raise Overloaded("Another pool file is being looked at; try again shortly.")
        async with self._lock:
            try:
                return await asyncio.to_thread(work)
            except ConfigInvalid as error:
                words = f"The pool file is not valid: {'; '.join(error.faults)}"
                raise InvalidRequest(words, param="pool", code="invalid_pool") from None


def _add_read_route(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    @router.get(
        "",
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
        return json_reply({"object": "policy", "catalog": catalog.digest, "labels": labels, "rules": rules})


def _rule(catalog: Catalog, rule: Rule) -> dict[str, Any]:
    worker_names: list[str] = []
    for worker in catalog.workers.values():
        if rule.name in _rules_of(worker):
            worker_names.append(worker.name)
    return {"name": rule.name, "labels": sorted(rule.labels), "excludes": worker_names}


def _rules_of(worker: Worker) -> frozenset[str]:
    return frozenset(rule.name for rule in worker.excluding_rules)


def _add_check_route(router: APIRouter, context: AdminContext, keys: Keys, reader: PoolFileReader) -> None:
    @router.post(
        "/check",
        operation_id="check_policy",
        summary="Show who may see what under a pool file.",
        response_model=replies.PolicyTable,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("PoolRequest"),
    )
    async def check_policy(
        caller: Annotated[Caller, keys.needs("policy:read")],
        body: Annotated[dict[str, object], json_body(context.gateway.bounds)],
    ) -> Any:
        """For each tier and each set of labels that matters the recipients, as `baton policy check` prints them."""
        text = read(PoolRequest, body).pool
        return json_reply({"object": "policy.table"} | await reader.run(lambda: _table(context.read_pool(text))))


def _table(catalog: Catalog) -> dict[str, Any]:
    """Return the table. Raises `ConfigInvalid` for a file whose table would have more than `MOST_CELLS`."""
    sets = 1 + len(labels_of(catalog)) + len(catalog.rules)
    if sets * sum(len(recipients(catalog, tier)) for tier in catalog.tiers.values()) > MOST_CELLS:
        raise ConfigInvalid(["it has too many labels, tiers and workers to be shown here; use `baton policy check`"])
    return policy_table.table(catalog)


def _add_difference_route(router: APIRouter, context: AdminContext, keys: Keys, reader: PoolFileReader) -> None:
    @router.post(
        "/diff",
        operation_id="compare_policy",
        summary="Compare a pool file with the one in force.",
        response_model=replies.PolicyDifference,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("PoolRequest"),
    )
    async def compare_policy(
        caller: Annotated[Caller, keys.needs("policy:read")],
        body: Annotated[dict[str, object], json_body(context.gateway.bounds)],
    ) -> Any:
        """Proves that the file shows nothing to anybody who does not see it now, or gives a witness for each tier and
        recipient, as `baton policy diff` does."""
        text, old = read(PoolRequest, body).pool, context.gateway.catalog()
        widened_cells = await reader.run(lambda: _compare(old, context.read_pool(text)))
        witnesses = [policy_table.witness_to_json(widening) for widening in widened_cells]
        return json_reply({"object": "policy.difference", "widens": bool(widened_cells), "witnesses": witnesses})


def _compare(old: Catalog, new: Catalog) -> list[Widening]:
    """Return the witnesses. Raises `ConfigInvalid` for files that would take more than `MOST_DECISIONS`."""
    readers = sum(len(recipients(new, tier)) for tier in new.tiers.values())
    if readers << min(len(labels_of(old, new)), MOST_LABELS) > MOST_DECISIONS:
        raise ConfigInvalid(["it has too many labels, tiers and workers to be compared here; use `baton policy diff`"])
    return list(widenings(old, new))


def _add_trial_route(router: APIRouter, context: AdminContext, keys: Keys, reader: PoolFileReader) -> None:
    @router.post(
        "/try",
        operation_id="try_policy",
        summary="Apply a pool file to past runs.",
        response_model=replies.PolicyTrial,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("TrialRequest"),
    )
    async def try_policy(
        caller: Annotated[Caller, keys.needs("policy:read", "runs:read")],
        body: Annotated[dict[str, object], json_body(context.gateway.bounds)],
    ) -> Any:
        """The newest runs of the caller's tenant, at most a thousand, with calls that the file would have refused."""
        trial_request = read(TrialRequest, body)
        new = await reader.run(lambda: context.read_pool(trial_request.pool))
        store = context.gateway.store.of_tenant(caller.tenant)
        query = RunQuery(tenant=caller.tenant, since=context.gateway.now() - trial_request.since_seconds, limit=PAGE)
        trial = await _try_on_runs(store, new, query)
        return json_reply({"object": "policy.trial", "all": trial.runs < MOST_RUNS} | trial.as_json())


async def _try_on_runs(store: TenantStore, catalog: Catalog, query: RunQuery) -> PolicyTrial:
    """Apply the catalog to the runs of a query, the newest first."""
    trial = PolicyTrial()
    async for rows in run_pages(store.runs, query):
        for row in rows:
            try:
                refused_run = find_refused_calls((await store.journal(row.id)).events, catalog)
            except NotFound:  # pruned meanwhile
                continue
            except EventMalformed:
                trial.damaged.append(row.id)
                continue
            if refused_run is not None:
                trial.refused.append(refused_run)
        trial.runs += len(rows)
        if trial.runs >= MOST_RUNS:
            break
    return trial
