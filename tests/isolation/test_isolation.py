"""Two tenants on one service see and change nothing of each other's, by whatever route."""

from pathlib import Path
from typing import Any

import pytest

from app.gateway.http.callers import Caller
from app.store.protocol import Actor
from app.store.sql import SqlStore, SqlTenantStore
from tests.harness.in_process import pool_text, running_service
from tests.harness.stand_ins import GatewayStandIn
from tests.isolation.admin_requests import SERVICE_WIDE
from tests.isolation.commands import COMMANDS, WITHOUT, takers_of_a_tenant
from tests.isolation.operations import EVERY_REQUEST, ONE_PERSON, Report, play, routes_of
from tests.isolation.requests import REQUESTS
from tests.stubs import ProviderStub

pytestmark = pytest.mark.long

OPERATIONS = 110
SEED = 22
POSTGRES = pytest.mark.integration


async def play_and_report(
    folder: Path, stub: ProviderStub, environ: dict[str, str], *, browses: bool = False
) -> Report:
    """Play with the public and the admin API; with `browses` with both consoles, too."""
    async with running_service(folder, pool_text(stub) + ONE_PERSON, environ) as runtime:
        return await play(runtime, stub, OPERATIONS, SEED, browses=browses)


async def test_no_route_shows_or_changes_what_another_tenant_has(stub: ProviderStub, tmp_path: Path) -> None:
    report = await play_and_report(tmp_path, stub, {}, browses=True)
    assert (report.leaks, report.meddlings, report.faults) == ([], [], [])
    assert set(report.operations) == set(report.reached) == set(EVERY_REQUEST)
    without = {route for route, count in report.reached.items() if not count}
    assert without == SERVICE_WIDE, "each other route has given something"
    assert report.pages > 150, "pages of both consoles"


def test_every_route_has_its_operations() -> None:
    routes = routes_of(GatewayStandIn().app)
    assert set(routes) == set(REQUESTS), "give a new route its request in tests/isolation/requests.py"


def test_every_command_that_takes_a_tenant_is_known() -> None:
    assert set(takers_of_a_tenant()) == set(COMMANDS) | WITHOUT, "add the command to tests/isolation/commands.py"


# The mutations: each takes one protection away and shows that the next one holds, or that the operations notice.


def without_the_routes_checks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Caller, "sees", lambda _caller, _tenant: True)


def with_reads_of_the_service(patch: pytest.MonkeyPatch) -> None:
    """Reads for a caller that forget the tenant, as on a database without row-level security."""
    forget(patch, "read_for")


def forget(patch: pytest.MonkeyPatch, verb: str) -> None:
    """Have a verb of the store that is told the caller's tenant forget it."""
    original = getattr(SqlStore, verb)

    async def forgetful(store: SqlStore, _tenant: str | None, work: Any, **options: Any) -> Any:
        return await original(store, None, work, **options)

    patch.setattr(SqlStore, verb, forgetful)


def with_writes_of_the_service(patch: pytest.MonkeyPatch) -> None:
    async def append(store: Any, entry: Any) -> Any:
        return await store._store.append(entry)

    async def erase(store: Any, run: str, *, by: Actor) -> bool:
        return bool(await store._store.erase(run, by=by))

    async def rate(store: Any, rating: Any) -> Any:
        return await store._store.rate(rating)

    patch.setattr(SqlTenantStore, "append", append)
    patch.setattr(SqlTenantStore, "erase", erase)
    patch.setattr(SqlTenantStore, "rate", rate)
    forget(patch, "write_for")


@POSTGRES
async def test_postgres_refuses_reads_that_no_route_checks(
    stub: ProviderStub, tmp_path: Path, migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_the_routes_checks(monkeypatch)
    report = await play_and_report(tmp_path, stub, {"BATON_DATABASE_URL": migrated_postgres_url})
    assert (report.leaks, report.meddlings, report.faults) == ([], [], [])


@POSTGRES
async def test_postgres_refuses_writes_that_no_route_checks(
    stub: ProviderStub, tmp_path: Path, migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_the_routes_checks(monkeypatch)
    with_reads_of_the_service(monkeypatch)
    report = await play_and_report(tmp_path, stub, {"BATON_DATABASE_URL": migrated_postgres_url})
    assert report.meddlings == []
    assert report.leaks, "the operations would notice a leak"


async def test_the_operations_notice_a_write_that_nobody_checks(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mutation in (without_the_routes_checks, with_reads_of_the_service, with_writes_of_the_service):
        mutation(monkeypatch)
    report = await play_and_report(tmp_path, stub, {})
    assert any("/v1/runs" in meddling for meddling in report.meddlings)
    assert any("/admin/v1/keys" in meddling for meddling in report.meddlings)
    assert any("/admin/v1/budgets" in meddling for meddling in report.meddlings)
