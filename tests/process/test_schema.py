"""A process over a Postgres with another schema than it expects says so, with the remedy, and goes on."""

import asyncio
from pathlib import Path

import pytest

from app.store.sqlkit.migrate import newest
from app.store.sqlkit.revisions import status
from tests.harness.processes import environment, running_process
from tests.harness.waiting import wait_until
from tests.integration.installation import execute

pytestmark = pytest.mark.integration
NEWER = "CREATE TABLE alembic_version AS SELECT '9999' AS version_num"


@pytest.mark.long
def test_each_role_says_that_the_schema_is_not_its_own(
    tmp_path: Path, postgres_url: str, redis_server_url: str
) -> None:
    assert newest() == status(postgres_url).head
    environ = environment(
        tmp_path, BATON_DATABASE_URL=postgres_url, BATON_REDIS_URL=redis_server_url, BATON_PEPPER="pepper" * 8
    )
    with running_process("dispatcher", tmp_path, environ) as engine:
        wait_until(lambda: "run `baton migrate`" in engine.log, what="the engine has found no tables")
        asyncio.run(execute(postgres_url, NEWER))
        with running_process("gateway", tmp_path, environ) as gateway:
            wait_until(lambda: "newer than this program" in gateway.log, what="the gateway has found newer ones")
            assert f"revision 9999, this program {newest()}" in gateway.log
