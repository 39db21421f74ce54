"""Operations of two tenants on one service: every route of the route table, on their own runs and on each other's.

Each tenant has a word of its own in everything that it sends, and workers repeat it. An operation leaks if its reply
has the other tenant's word, or the id of a run of the other's that was not in the request; it meddles if a run of the
other's is not as it was before. Each route has its request in `REQUESTS`; a route without one is a fault.
"""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.routing import Route

from app.console.app import Console
from app.core.roles import ROLES
from app.engine.sealer import Sealer
from app.gateway.http.api_keys import mint
from app.process.administration import admin_app
from app.process.wiring import Runtime
from app.store.protocol import Hold, HoldQuery, KeyQuery, RunRow
from tests.harness.console import ORIGIN, SAME_ORIGIN, sign_in
from tests.harness.prepared_apps import lent_app
from tests.harness.stand_ins import api_routes
from tests.harness.waiting import PATIENCE_SECONDS, until
from tests.isolation.admin_requests import ADMIN_REQUESTS
from tests.isolation.requests import REQUESTS, Request, Tenant, asking
from tests.stubs import Echo, ProviderStub, Reply, ToolCall
from tests.stubs.record import ReceivedRequest

TENANTS = ("amber", "birch")
ONE_PERSON = "\n[tiers.baton-mini.approval]\nfour_eyes = false\n"
"""In a pool file: a tenant's key may approve the plans of its own runs."""
FORM = {"decision": "approve", "action": "run", "once": "page", "score": "1", "model": "baton-mini"}
"""Fields of the console's forms."""
RUN_ID = re.compile(r"run_[0-9a-z]+")
TILES = ("0/000.p/1", "entries/000.p/1")
"""Tiles of the transparency log. Each tenant may read its hashes, and none of them its entries."""
EVERY_REQUEST: Mapping[tuple[str, str], Request] = {**REQUESTS, **ADMIN_REQUESTS}
FIRST = {("POST", path) for path in ("/v1/chat/completions", "/v1/responses", "/admin/v1/keys", "/admin/v1/budgets")}
"""The routes that give each tenant what is its own."""
KEPT_RUNS = 40
"""Most runs of a tenant that operations choose from."""


class Mirror(Echo):
    """A worker that repeats the request. It calls the tools that are on offer, unless it has their results."""

    def reply(self, received: ReceivedRequest) -> Reply:
        """Return the reply to a request."""
        body = received.json
        if body.get("tools") and body["messages"][-1]["role"] != "tool":
            return Reply(chunks=(), tool_calls=(ToolCall("look"),), finish="tool")
        return Reply(chunks=(json.dumps(body["messages"])[-2_000:],))


ERASES = {("DELETE", "/v1/runs/{run}"), ("DELETE", "/v1/responses/{response}"), ("DELETE", "/v1/plans/{plan}")}


@dataclass
class Report:
    """The operations that were carried out, and what was wrong with them."""

    operations: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often each route was asked for something of the other tenant's."""
    request_count: int = 0
    """The number of requests."""
    pages: int = 0
    """Those of them that were pages and forms of the console about foreign things."""
    reached: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often each route gave a tenant what is its own."""
    leaks: list[str] = field(default_factory=list)
    meddlings: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Replies with a status of 500 or more."""


def routes_of(app: FastAPI, prefix: str = "/v1/") -> list[tuple[str, str]]:
    """Return every method and path below a prefix."""
    routes = []
    for route in api_routes(list(app.routes)):
        routes += [(method, route.path) for method in sorted((route.methods or set()) - {"HEAD"})]
    return [route for route in routes if route[1].startswith(prefix)]


async def play(
    runtime: Runtime,
    stub: ProviderStub,
    operations: int,
    seed: int,
    *,
    least: int = 1,
    browses: bool = False,
) -> Report:
    """Carry out operations on a running service in turns; the first ones give each tenant runs of its own.

    Raises KeyError for a route that has no request. Each route is asked `least` times for foreign things.
    `browses` has each page of both consoles asked for them, too.
    """
    stub.always("*", Mirror("mirror"))
    chance = random.Random(seed)
    app, admin = lent_app(runtime.gateway), admin_app(runtime, {}, has_engine=True)
    routes = [*routes_of(app), *routes_of(admin, "/admin/v1/")]
    requests = [(route, EVERY_REQUEST[route]) for route in routes]
    report = Report()
    tenants = [await _tenant(runtime, app, admin, name) for name in TENANTS]
    first = [(route, request) for route, request in requests if route in FIRST]
    plan = [(own, *operation) for own in (True,) * 4 for operation in first]
    plan.append((True, ("POST", "/v1/chat/completions"), asking))
    plan += [
        (own, *request)
        for own in (True, False)
        for _ in range(least)
        for request in requests
        if request[0] not in ERASES
    ]
    while len(plan) < operations // len(TENANTS):
        plan.append((chance.random() < 0.5, *chance.choice(requests)))
    erasures = [(own, *request) for own in (False, True) for request in requests if request[0] in ERASES]
    await Sealer(runtime.context, ()).look(asyncio.Event())
    for part in (plan, erasures):
        for own, route, request in part:
            for mine, other in (tenants, tenants[::-1]):
                await _operate(runtime, report, chance, route, request, mine, mine if own else other, other)
        if browses and part is plan:
            for mine, other in (tenants, tenants[::-1]):
                await _browse(runtime, app, report, mine, other)
                await _browse(runtime, admin, report, mine, other, is_admin=True)
    for tenant in tenants:
        await tenant.client.aclose()
        await tenant.admin.aclose()
    return report


async def _tenant(runtime: Runtime, app: FastAPI, admin: FastAPI, name: str) -> Tenant:
    key, row = mint(runtime.gateway.pepper, tenant=name, name=name, scopes=sorted(ROLES["owner"]), now=0.0)
    assert await runtime.gateway.store.add_key(row)
    headers = {"authorization": f"Bearer {key}"}
    clients = []
    for application in (app, admin):
        transport = httpx.ASGITransport(application, raise_app_exceptions=False)
        clients.append(
            httpx.AsyncClient(transport=transport, base_url="http://baton", headers=headers, timeout=PATIENCE_SECONDS)
        )
    tenant = Tenant(name, *clients, key_ids=[row.id])
    hold = Hold(f"hold_{name}", "key", row.id, "", tenant.word, placed_at=0.0, placed_by="")
    await runtime.gateway.store.place_hold(hold)
    await runtime.gateway.store.release_hold(hold.id, 0.0)  # one in force would forbid the erasures
    return tenant


async def _operate(
    runtime: Runtime,
    report: Report,
    chance: random.Random,
    route: tuple[str, str],
    request: Request,
    mine: Tenant,
    target: Tenant,
    other: Tenant,
) -> None:
    """One request of `mine` about something of `target`; nothing of `other` may show or change unless it is `mine`."""
    method, path = route
    responses = target.background if path.endswith("{response}/cancel") else target.responses
    kinds = {"run": target.runs, "response": responses, "plan": target.plans, "approval": list(target.asking)}
    kinds |= {"key": target.key_ids[1:], "budget": target.budgets}
    if any(f"{{{kind}}}" in path and not having for kind, having in kinds.items()):
        return
    operation = request(mine, target, chance.choice)
    foreign = target is other
    ids = {kind: chance.choice(having or [""]) for kind, having in kinds.items()}
    ids |= {"n": "0", "model": "baton-mini", "other": chance.choice(target.runs or [""])}
    ids |= {"tenant": target.name, "hold": f"hold_{target.name}", "conductor": "planner", "tier": "baton-mini"}
    ids["tile"] = chance.choice(TILES) if foreign else TILES[0]
    if method == "POST" and path.endswith("/approvals/{approval}"):
        operation.body["digest"] = target.asking[ids["approval"]]
    url = re.sub(r"\{(\w+)(?::path)?\}", lambda match: ids[match[1]], path) + operation.path
    headers = dict(operation.headers)
    if method == "POST" and not headers and chance.random() < 0.2:
        headers["Idempotency-Key"] = f"key {chance.randrange(1_000_000)}"
    request_text, administers = f"{url} {json.dumps(operation.body)}", path.startswith("/admin/")
    before = await _standing(runtime, RUN_ID.findall(request_text)) if foreign else {}
    rights = await _rights(runtime, other) if foreign and administers else None
    client = mine.admin if administers else mine.client
    reply = await client.request(method, url, json=operation.body, headers=headers)
    report.request_count += 1
    reply_text = f"{reply.text} {dict(reply.headers)}"
    about = f"{mine.name}: {method} {url}"
    if other.word in reply_text or _ids_of(other, reply_text, request_text):
        report.leaks.append(f"{about}: {reply.status_code}")
    if reply.status_code >= 500:
        report.faults.append(f"{about}: {reply.text[:200]}")
    if foreign:
        report.operations[route] += 1
        if before != await _standing(runtime, before) or rights not in (None, await _rights(runtime, other)):
            report.meddlings.append(about)
        return
    report.reached[route] += reply.status_code == 200
    if route == ("POST", "/v1/responses") and reply.status_code == 200 and operation.body.get("background"):
        await until(lambda: _is_over(runtime, reply.json()["id"].removeprefix("resp_")))
        mine.background.append(reply.json()["id"])
    _note(mine, route, request, ids, reply, headers)


async def _browse(
    runtime: Runtime, app: FastAPI, report: Report, mine: Tenant, other: Tenant, *, is_admin: bool = False
) -> None:
    """Ask for every page of the console about what the other tenant has, and send every form to it. `is_admin` says
    that it is the console of the admin API."""
    console = Console(
        app,
        runtime.gateway.peppers,
        runtime.gateway.now,
        lambda bug, path: report.faults.append(f"{path}: {bug!r}"),
        is_admin=is_admin,
    )
    [run, plan], ids_of_other = (other.runs[-1], other.plans[-1]), {*other.runs, *RUN_ID.findall(" ".join(other.plans))}
    asking, digest = next(iter(other.asking.items()))
    key, budget = other.key_ids[-1], other.budgets[-1]
    ids = {
        "plan": plan,
        "key": key,
        "tenant": other.name,
        "hold": f"hold_{other.name}",
        "conductor": "planner",
        "tier": "baton-mini",
    }
    before, rights = await _standing(runtime, ids_of_other), await _rights(runtime, other)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(console), base_url=ORIGIN, headers=SAME_ORIGIN, timeout=PATIENCE_SECONDS
    ) as client:
        await sign_in(client, mine.client.headers["authorization"].removeprefix("Bearer "))
        for path, methods in _pages(console):
            queries = ["", f"?a={run}&b={asking}&run={run}", f"?tenant={other.name}", f"?user={other.word}"]
            queries.append(f"?id={budget}&target={key}&actor={key}")
            if "POST" in methods:
                queries = queries[-1:]
            for query in queries[:1] if "{" in path else queries:
                of = ids | {"run": run if "approvals" not in path else asking}
                url = re.sub(r"\{(\w+)\}", lambda match, of=of: of[match[1]], path) + query
                form = FORM | {"digest": digest, "message": mine.word, "tenant": other.name, "name": mine.word}
                page = await (client.post(url, data=form) if "POST" in methods else client.get(url))
                _read_page(report, f"{mine.name}: {url}", page, other, {run, asking, plan})
    if before != await _standing(runtime, before) or rights != await _rights(runtime, other):
        report.meddlings.append(f"{mine.name}: the console")


def _pages(console: Console) -> list[tuple[str, set[str]]]:
    """Return the pages and forms of the console that need a session, with their methods."""
    routes = [route for route in console._pages.routes if isinstance(route, Route)]
    pages = [(route.path, route.methods or set()) for route in routes]
    return [route for route in pages if not re.search("/static/|/sign-", route[0])]


def _read_page(report: Report, about: str, page: httpx.Response, other: Tenant, kinds: set[str]) -> None:
    """Note what a page has of the other tenant's that was not in its request."""
    report.request_count += 1
    report.pages += 1
    words = [] if other.word in about else [other.word]  # a filter is shown as it was given
    if any(word in page.text for word in words) or _ids_of(other, page.text, f"{about} {' '.join(kinds)}"):
        report.leaks.append(f"{about}: {page.status_code}")
    if page.status_code >= 500:
        report.faults.append(f"{about}: {page.text[:200]}")


def _ids_of(other: Tenant, reply_text: str, request_text: str) -> set[str]:
    """Return the ids of a tenant's runs and keys that a reply has, without those that its request has."""
    ids = set(RUN_ID.findall(reply_text)) & other.every - set(RUN_ID.findall(request_text))
    return ids | {key for key in other.key_ids if key in reply_text and key not in request_text}


async def _is_over(runtime: Runtime, run: str) -> bool:
    return (await runtime.gateway.store.run(run)).ended_at is not None


async def _standing(runtime: Runtime, runs: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Return what a meddling with these runs would change: their rows, their ratings, and whether content is left."""
    standing = {}
    store = runtime.gateway.store
    for name in runs:
        row: RunRow = await store.run(name)
        standing[name] = (row.seq, row.state, row.erased, len(await store.feedback(name)))
    return standing


async def _rights(runtime: Runtime, of: Tenant) -> tuple[Any, ...]:
    """Return what a meddling with the administration of a tenant would change: its keys, its budgets, and itself."""
    store = runtime.gateway.store
    keys = [(row.id, row.digest, row.previous_until, row.revoked_at) for row in await store.keys(KeyQuery(of.name))]
    return keys, await store.budgets(of.name), await store.tenants(of.name), await store.holds(HoldQuery(of.name))


def _without(ids: Iterable[str], gone: Collection[str]) -> list[str]:
    """Return the ids that contain none of the run ids that are gone: other ids are made of a run's."""
    left = []
    for id_ in ids:
        if not any(name in id_ for name in gone):
            left.append(id_)
    return left


def _note(
    mine: Tenant,
    route: tuple[str, str],
    request: Request,
    ids: Mapping[str, str],
    reply: httpx.Response,
    request_text: Any,
) -> None:
    """Keep what a reply has given to its tenant, for later operations."""
    run = reply.headers.get("x-baton-run")
    if route in ERASES:
        gone = RUN_ID.findall(next(ids[kind] for kind in ("run", "response", "plan") if f"{{{kind}}}" in route[1]))
        mine.runs = [run for run in mine.runs if run not in gone]
        mine.responses = _without(mine.responses, gone)
        mine.background = [response for response in mine.background if response in mine.responses]
        mine.plans = _without(mine.plans, gone)
        mine.asking = {run: digest for run, digest in mine.asking.items() if run not in gone}
    if route == ("POST", "/admin/v1/keys") and reply.status_code == 200:
        mine.key_ids.append(reply.json()["id"])
    if route == ("POST", "/admin/v1/budgets") and reply.status_code == 200:
        mine.budgets = [*mine.budgets, reply.json()["id"]][-KEPT_RUNS:]
    if run is None or route[0] not in ("POST", "PATCH") or reply.status_code != 200:
        return
    mine.every.add(run)
    mine.runs = [*mine.runs, run][-KEPT_RUNS:]
    mine.keys += [key for key in request_text.values() if key not in mine.keys]
    mine.calls = [*mine.calls, *re.findall(r"call_run_[0-9a-z_]+", reply.text)][-KEPT_RUNS:]
    if request is asking:
        mine.asking[run] = reply.json()["baton"]["approval"]["digest"]
    if route == ("POST", "/v1/plans"):
        mine.plans = [*mine.plans, reply.json()["id"]][-KEPT_RUNS:]
    if route[1] == "/v1/responses":
        mine.responses = [*mine.responses, f"resp_{run}"][-KEPT_RUNS:]
