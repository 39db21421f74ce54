"""The admin API as one ASGI application: `create_admin(context)`.

Imported by name where the admin API has a port: its models take a twentieth of a second to make.
"""

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from msgspec.structs import replace

from app.gateway.admin import budgets, holds, keys, people, policy, pool, requests, tenants
from app.gateway.admin.context import AdminContext
from app.gateway.app import Application
from app.gateway.http import health
from app.gateway.http.admission import Admission
from app.gateway.http.callers import Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.idempotency import Idempotency
from app.gateway.runs import (
    approvals,
    disclosures,
    identity,
    log_route,
    models,
    overview_route,
    report_route,
    shadow_route,
)
from app.gateway.runs import route as runs


def create_admin(context: AdminContext) -> FastAPI:
    """Return the admin API with its description and its page, for a listener of its own."""
    # No other site's page may read it, whatever BATON_CORS_ORIGINS allows callers.
    context = replace(context, gateway=replace(context.gateway, origins=frozenset()))
    access: Keys = Keys(context.gateway)
    idempotency = Idempotency(context.gateway, Admission(context.gateway))
    logins: list[APIRouter] = []
    if context.people is not None:
        access_of_people = people.Access(context.gateway, context.people)
        logins.append(people.routes(access_of_people, context.people))
        access = access_of_people
    return Application(
        context.gateway,
        *logins,
        keys.routes(context, access),
        tenants.routes(context, access),
        budgets.routes(context, access),
        holds.routes(context, access, idempotency),
        pool.routes(context, access, idempotency),
        policy.routes(context, access),
        approvals.routes(context.gateway, access, None, "/admin/v1/approvals"),
        identity.routes(access, "/admin/v1"),
        people.rules(access, context.people),
        *_audit_trail(context.gateway, access),
        health.routes(context.gateway),
        title="Baton administration",
        schemas={**requests.SCHEMAS, **approvals.SCHEMAS},
    )


def _audit_trail(context: GatewayContext, access: Keys) -> tuple[APIRouter, ...]:
    """Return the routes of the public API about runs, for people who have logged in: their sessions count only here.
    The public API describes them."""
    routers = (
        identity.routes(access, "/v1"),
        models.routes(context, access),
        runs.routes(context, access, Idempotency(context, Admission(context))),
        report_route.routes(context, access),
        overview_route.routes(context, access),
        log_route.routes(context, access),
        disclosures.routes(context, access),
        shadow_route.routes(context, access),
    )
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute):
                route.include_in_schema = False
    return routers
