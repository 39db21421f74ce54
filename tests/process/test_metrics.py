"""The metrics of a whole process: about itself, its connections and its tenants, and on a listener of their own."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from app.process.wiring import Runtime
from app.telemetry import Telemetry
from tests.harness.in_process import client_of, pool_text, running_service
from tests.harness.processes import environment, running_process
from tests.harness.servers import free_port
from tests.harness.waiting import PATIENCE_SECONDS, until
from tests.stubs import ProviderStub, Reply

LOGINS = {
    "BATON_ADMIN_URL": "http://127.0.0.1",
    "BATON_OIDC_ISSUER": "http://127.0.0.1:9",
    "BATON_OIDC_CLIENT_ID": "baton",
    "BATON_OIDC_ROLES": "groups=all=>owner",
}
"""Logins at a provider that is away."""


@pytest.fixture
async def service(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    stub.always("alpha", Reply(chunks=("Fine.",)))
    settings = {"BATON_REVISION": "0a1b2c3", "BATON_METRICS_TENANTS": "1"}
    async with running_service(tmp_path, pool_text(stub), settings) as runtime:
        yield runtime


async def test_a_process_describes_itself(service: Runtime) -> None:
    async with client_of(service) as client:
        body = {"model": "baton-mini", "messages": [{"role": "user", "content": "Hello."}]}
        reply = await client.post("/v1/chat/completions", json=body)
        run = (await client.get(f"/v1/runs/{reply.headers['x-baton-run']}")).json()
        text = (await client.get("/metrics")).text
    figures = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    (build,) = [name for name in figures if name.startswith("baton_build_info")]
    assert 'revision="0a1b2c3"' in build
    assert 'version="' in build
    assert figures["process_resident_memory_bytes"] > 0
    assert figures["process_start_time_seconds"] > 0
    assert any(name.startswith("python_info") for name in figures)
    assert any(name.startswith("python_gc_collections_total") for name in figures)
    assert figures['baton_tenant_cost_micro_usd_total{tenant="acme"}'] == round(run["cost_usd"] * 1e6)
    assert figures['baton_pool_connections_max{pool="database"}'] > 0
    assert figures['baton_pool_waits_total{pool="database"}'] == 0


async def test_connections_are_counted_until_they_are_free_again(service: Runtime) -> None:
    in_use = 'baton_pool_connections_in_use{pool="database"} '

    async def count() -> float:
        async with client_of(service) as client:
            text = (await client.get("/metrics")).text
        return next(float(line.removeprefix(in_use)) for line in text.splitlines() if line.startswith(in_use))

    async def is_free() -> bool:
        return await count() == 0  # what seals, and what looks for work, takes one now and then

    assert await until(is_free)


def test_tenants_beyond_the_bound_are_counted_together() -> None:
    telemetry = Telemetry(tenants=2)
    for tenant, usd in (("a", 1), ("b", 2), ("c", 4), ("a", 8), ("", 16)):
        telemetry.spend(tenant, usd)
    name = "baton_tenant_cost_micro_usd_total"
    spent = {
        tenant: telemetry.registry.get_sample_value(name, {"tenant": tenant}) for tenant in ("a", "b", "c", "other")
    }
    assert spent == {"a": 9, "b": 2, "c": None, "other": 20}


@pytest.mark.long
def test_metrics_and_the_admin_api_have_listeners_of_their_own(tmp_path: Path) -> None:
    port, admin_port = free_port(), free_port()
    settings = environment(tmp_path, BATON_METRICS_PORT=str(port), BATON_ADMIN_PORT=str(admin_port), **LOGINS)
    with running_process("serve", tmp_path, settings) as process:
        places = {
            "public": process.url,
            "own": f"http://127.0.0.1:{port}",
            "admin": f"http://127.0.0.1:{admin_port}",
        }
        statuses = {
            (where, path): httpx.get(f"{url}{path}", timeout=PATIENCE_SECONDS, trust_env=False).status_code
            for where, url in places.items()
            for path in ("/metrics", "/readyz", "/v1/models", "/admin/v1/keys", "/admin/login")
        }
        assert process.stop() == 0
    assert statuses == {
        ("public", "/metrics"): 404,
        ("public", "/readyz"): 200,
        ("public", "/v1/models"): 401,
        ("own", "/metrics"): 200,
        ("own", "/readyz"): 200,
        ("own", "/v1/models"): 404,
        ("admin", "/metrics"): 404,
        ("admin", "/readyz"): 200,
        ("admin", "/v1/models"): 401,
        ("public", "/admin/v1/keys"): 404,
        ("own", "/admin/v1/keys"): 404,
        ("admin", "/admin/v1/keys"): 401,
        ("public", "/admin/login"): 404,
        ("own", "/admin/login"): 404,
        ("admin", "/admin/login"): 503,
    }
