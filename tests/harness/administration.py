"""The admin API and two gateways over one real database, with clocks that tests may move."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
from fastapi import FastAPI
from msgspec.structs import replace

from app.core.pool.catalog import ConductorSpec, Limits, Tier
from app.core.roles import ROLES
from app.gateway.admin.context import AdminContext
from app.gateway.admin.people import People, Provider
from app.gateway.administration import create_admin
from app.gateway.http.api_keys import mint
from app.process.config import read_catalog_text
from app.store.protocol import Store
from app.store.sql import open_store
from tests.harness.prepared_apps import lent_app
from tests.harness.stand_ins import CATALOG, PEPPER, GatewayStandIn

CONDUCTED = replace(
    CATALOG,
    tiers=CATALOG.tiers
    | {
        "baton-ultra": Tier(
            "baton-ultra", ("beta",), ConductorSpec("model", worker="alpha"), "beta", {"medium": Limits()}
        )
    },
)
"""The pool of the stand-ins, with a tier that a model conducts."""
PEOPLE = People(cast(Provider, None), ())
"""Logins at a provider that no test asks."""


@dataclass
class AdminStandIn:
    """An admin API over a real store; `stand_in` has its clocks."""

    store: Store
    stand_in: GatewayStandIn
    served: list[str] = field(default_factory=list)
    """The models that the server of each conductor serves."""

    def __post_init__(self) -> None:
        self.gateway = replace(self.stand_in.context, store=self.store, catalog=lambda: CONDUCTED)
        self.context = AdminContext(
            self.gateway,
            read_pool=lambda text: read_catalog_text(text, "the pool file", {}),
            versions=lambda _conductor: self.served,
            people=PEOPLE,
            state=lambda worker: "open" if worker.name == "beta" else "closed",
        )
        self.app: FastAPI = create_admin(self.context)

    async def add_key(
        self, name: str, role: str = "owner", *, tenant: str = "acme", scopes: Sequence[str] = (), **more: Any
    ) -> str:
        """Store a key of a role, or with scopes, under its name as id; return its string."""
        granted = scopes or ROLES[role]
        key, row = mint(PEPPER, tenant=tenant, name=name, scopes=granted, now=0.0, public=name)
        assert await self.store.add_key(replace(row, **more))
        return key

    def client(self, key: str | None = None, app: FastAPI | None = None) -> httpx.AsyncClient:
        """Return a client of the admin API, or of another application, that calls it without a socket."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(app or self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://baton", headers=headers)

    def gateway_app(self) -> FastAPI:
        """Return one more gateway over the same database, with a cache of keys of its own."""
        return lent_app(self.gateway)


@asynccontextmanager
async def administration(folder: Path) -> AsyncIterator[AdminStandIn]:
    """Open an admin API over a new database in a folder."""
    async with open_store(f"sqlite:///{folder / 'admin.db'}") as store:
        yield AdminStandIn(store, GatewayStandIn())
