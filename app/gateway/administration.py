"""The admin API as one ASGI application: `create_admin(context)`.

Imported by name where the admin API has a port: its models take a twentieth of a second to make.
"""

from dataclasses import replace

from fastapi import APIRouter, FastAPI

from app.gateway.admin import budgets, holds, keys, people, policy, pool, requests, tenants
from app.gateway.admin.context import AdminContext
from app.gateway.app import Application
from app.gateway.http import health
from app.gateway.http.auth import Keys
from app.gateway.runs import approvals


def create_admin(context: AdminContext) -> FastAPI:
    """The admin API with its description and its page, for a listener of its own."""
    # No other site's page may read it, whatever BATON_CORS_ORIGINS allows callers.
    context = replace(context, gateway=replace(context.gateway, origins=frozenset()))
    access = Keys(context.gateway)
    logins: list[APIRouter] = []
    if context.people is not None:
        access = found = people.Access(context.gateway, context.people)
        logins.append(people.routes(found, context.people))
    return Application(
        context.gateway,
        *logins,
        keys.routes(context, access),
        tenants.routes(context, access),
        budgets.routes(context, access),
        holds.routes(context, access),
        pool.routes(context, access),
        policy.routes(context, access),
        approvals.routes(context.gateway, access, None, "/admin/v1/approvals"),
        health.routes(context.gateway),
        title="Baton administration",
        schemas={**requests.SCHEMAS, **approvals.SCHEMAS},
    )
