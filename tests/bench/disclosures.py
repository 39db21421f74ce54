"""Questions to the ledger of disclosures over a million calls, on Postgres.

`python -m tests.bench.disclosures [--calls 1000000]` fills the ledger of a server of its own inside the database, asks
a gateway over HTTP who was sent what, with a key of one tenant (under row-level security) and with one of all tenants,
and prints how long each question takes. Exit status 1 if the question of the auditor takes 100 ms or more.
"""

import argparse
import asyncio
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import asyncpg
import httpx
from msgspec.structs import replace

from app.gateway.http.api_keys import mint
from app.process.wiring import Runtime
from app.store.sqlkit.migrate import migrate
from tests.harness import servers
from tests.harness.in_process import pool_text, running_service
from tests.harness.prepared_apps import app_over
from tests.stubs import ProviderStub

BUDGET_MS = 100.0
ASKED = 21
"""How often each question is asked."""
FIRST_DAY = 1_760_000_000
DAY = 86_400
DAYS = 30
TUESDAY = FIRST_DAY + 12 * DAY
TENANT = "tenant-3"
FILL = """
INSERT INTO disclosures (run, call, at, step, kind, recipient, provider, model, region, tenant, key, labels, saw_user,
  saw_steps, saw_results, unseen, planned_by, attempt, passed_over, bytes, outcome, input_tokens, output_tokens)
SELECT 'run_' || (n / 3), 'call_' || n, $2 + n * ($3::float8 / $1), CASE n % 3 WHEN 0 THEN NULL ELSE n % 3 - 1 END,
  CASE n % 3 WHEN 0 THEN 'conductor' ELSE 'worker' END,
  CASE n % 3 WHEN 0 THEN 'planner' ELSE 'worker-' || (n / 3 % 11) END, 'provider-' || (n % 4), 'model-' || (n % 11),
  CASE n % 5 WHEN 0 THEN 'eu' ELSE '' END, 'tenant-' || (n / 3 % 20), 'key-' || (n / 3 % 60),
  CASE WHEN n % 200 = 0 THEN '["phi"]' END, n % 3 <> 2, CASE n % 3 WHEN 2 THEN ',0,' ELSE '' END, false, '', 'model', 1,
  NULL, 2000 + n % 5000, 'ok', 500, 200
FROM generate_series(1, $1::bigint) AS n
"""
TAG = """
INSERT INTO tags (name, value, run) SELECT 'user', 'user-' || (n % 20000), 'run_' || n
FROM generate_series(1, $1::bigint / 3) AS n
"""
DAY_OF = f"since={TUESDAY}&until={TUESDAY + DAY}"
AUDITOR = "who let worker-3 see the user or step 0 that Tuesday, and why"
QUESTIONS: Mapping[str, str] = {
    AUDITOR: f"recipient=worker-3&saw=user&saw=step:0&{DAY_OF}",
    "the same, of all 30 days": "recipient=worker-3&saw=user&saw=step:0",
    "a step that nobody saw that Tuesday": f"recipient=worker-3&saw=step:9&{DAY_OF}",
    "conductors of that Tuesday": f"recipient_kind=conductor&{DAY_OF}",
    "anything labelled phi that Tuesday": f"saw=label:phi&{DAY_OF}",
    "one end user": "user=user-4711",
    "one run": "run=run_1234",
    "a key of that Tuesday": f"key=key-3&{DAY_OF}",
    "the newest": "",
    "a page of 1,000": f"recipient=worker-3&limit=1000&{DAY_OF}",
}


async def fill(url: str, calls: int) -> None:
    """Make the rows inside the database."""
    connection = await asyncpg.connect(url.replace("postgresql+asyncpg", "postgresql"))
    try:
        await connection.execute(FILL, calls, float(FIRST_DAY), float(DAYS * DAY), timeout=600)
        await connection.execute(TAG, calls, timeout=600)
        await connection.execute("VACUUM ANALYZE disclosures, tags", timeout=600)
    finally:
        await connection.close()


async def ask(runtime: Runtime, *, all_tenants: bool) -> dict[str, tuple[float, float, int]]:
    """Ask every question; the median and the longest time in milliseconds, and the rows of each."""
    key, row = mint(runtime.gateway.pepper, tenant=TENANT, name="auditor", scopes=["audit:read"], now=0.0)
    assert await runtime.gateway.store.add_key(replace(row, all_tenants=all_tenants))
    costs: dict[str, tuple[float, float, int]] = {}
    with app_over(runtime.gateway) as app:
        transport, headers = httpx.ASGITransport(app), {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://baton", headers=headers, timeout=60
        ) as client:
            for name, question in QUESTIONS.items():
                times = []
                for _ in range(ASKED):
                    began = time.perf_counter()
                    reply = await client.get(f"/v1/disclosures?{question}")
                    times.append(1_000 * (time.perf_counter() - began))
                    assert reply.status_code == 200, reply.text
                costs[name] = (statistics.median(times), max(times), len(reply.json()["data"]))
    return costs


async def measure_queries(url: str, folder: Path, calls: int) -> bool:
    """Fill, ask and print. True if the auditor's question is answered within its budget."""
    began = time.monotonic()
    await fill(url, calls)
    print(f"{calls:,} calls in {time.monotonic() - began:.0f} s")
    met = True
    async with (
        ProviderStub() as stub,
        running_service(folder, pool_text(stub), {"BATON_DATABASE_URL": url}, audits=False) as runtime,
    ):
        for all_tenants in (False, True):
            print("a key of all tenants" if all_tenants else "a key of one tenant of twenty, under row-level security")
            for name, (median, longest, rows) in (await ask(runtime, all_tenants=all_tenants)).items():
                print(f"  {name:62} {median:7.1f} ms  longest {longest:7.1f} ms  {rows:5} rows")
                met = met and (name != AUDITOR or median < BUDGET_MS)
    return met


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.disclosures")
    parser.add_argument("--calls", type=int, default=1_000_000)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name, servers.postgres() as server:
        migrate(server.url)
        return 0 if asyncio.run(measure_queries(server.url, Path(name), options.calls)) else 1


if __name__ == "__main__":
    sys.exit(main())
