"""The migrations make what `app/store/sqlkit/tables.py` says, on both databases, and 0.1.0 works on the result."""

import asyncio
import io
import json
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, inspect, text
from sqlalchemy.ext.asyncio import create_async_engine

from app.errors import ConfigInvalid, StoreUnavailable
from app.store.sql import open_store
from app.store.sqlkit.migrate import alembic_config, migrate
from app.store.sqlkit.revisions import status
from app.store.sqlkit.runner import parse_url
from app.store.sqlkit.tables import BUDGET_HOLDS, BUDGET_WINDOWS, METADATA
from tests.conformance.conversations import contents_of, converse
from tests.harness import processes

ON_BOTH = pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.integration)])


@ON_BOTH
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    url_text = (
        f"sqlite:///{tmp_path}/baton.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    )
    return str(url_text)


@ON_BOTH
def current(request: pytest.FixtureRequest, tmp_path: Path, make_schema: Callable[[str], None]) -> str:
    """The URL of a database of the test's own with the schema in it, which is a copy."""
    if request.param == "postgres":
        return str(request.getfixturevalue("copied_postgres_url"))
    make_schema(f"sqlite:///{tmp_path}/baton.db")
    return f"sqlite:///{tmp_path}/baton.db"


def ask(url: str, question: Callable[[Connection], Any]) -> Any:
    """Put a question to a database."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        engine = create_engine(parsed)
        with engine.connect() as conn:
            answer = question(conn)
        engine.dispose()
        return answer

    async def through_asyncpg() -> Any:
        engine = create_async_engine(parsed)
        async with engine.connect() as conn:
            answer = await conn.run_sync(question)
        await engine.dispose()
        return answer

    return asyncio.run(through_asyncpg())


def differences(conn: Connection) -> list[Any]:
    context = MigrationContext.configure(conn, opts={"compare_type": True, "compare_server_default": True})
    return list(compare_metadata(context, METADATA))


def tables(conn: Connection) -> set[str]:
    return set(inspect(conn).get_table_names()) - {"alembic_version"}


def index_conditions(conn: Connection) -> dict[str, bool]:
    """Index names, and whether they are partial: Alembic's comparison does not look at conditions."""
    inspector = inspect(conn)
    indexes = [index for table in METADATA.tables for index in inspector.get_indexes(table)]
    listed = {}
    for index in indexes:
        listed[str(index["name"])] = any(name.endswith("_where") for name in index.get("dialect_options", {}))
    return listed


@pytest.mark.long
def test_the_migrations_make_what_the_code_expects(database: str) -> None:
    migrate(database)
    assert ask(database, differences) == []
    assert ask(database, tables) == set(METADATA.tables)
    of_runs = {"runs_open", "runs_unhappy", "runs_by_cost", "runs_by_tenant_cost", "runs_by_origin"}
    partial = of_runs | {"events_one_end", "tags_of_callers", "disclosures_labelled"}
    assert ask(database, index_conditions) == {
        str(index.name): index.name in partial for table in METADATA.tables.values() for index in table.indexes
    }


def _list_options(options: Mapping[str, object]) -> list[str]:
    """The options of a table as Postgres stores them."""
    return [f"{name}={value}" for name, value in options.items()]


@pytest.mark.integration
@pytest.mark.long
def test_pages_keep_room_for_renewals(migrated_postgres_url: str) -> None:
    room = "SELECT relname, reloptions FROM pg_class WHERE relkind = 'r' AND reloptions IS NOT NULL"
    storage_options = ask(
        migrated_postgres_url, lambda conn: {name: options for name, options in conn.exec_driver_sql(room)}
    )
    expected = {table.name: table.dialect_options["postgresql"]["with"] for table in METADATA.tables.values()}
    assert storage_options == {name: _list_options(options) for name, options in expected.items() if options}


@pytest.mark.long
def test_every_version_goes_up_and_down(current: str) -> None:
    migrate(current, "base")
    assert ask(current, tables) == set()
    migrate(current)
    assert ask(current, differences) == []


def test_the_folder_of_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    migrate(f"sqlite:///{tmp_path}/data/baton.db")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_a_file_of_the_newest_schema_is_left_alone(
    tmp_path: Path, embedded_database: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alembic would only look at it: to import that takes a command a fifth of a second."""
    url = f"sqlite:///{tmp_path}/baton.db"
    monkeypatch.delattr("app.store.sqlkit.migrate.alembic_config")
    monkeypatch.delattr("app.store.sqlkit.revisions.alembic_config")
    migrate(url)
    assert (status(url).is_current, status(url).pending) == (True, ())


def test_the_way_down_brings_the_slices_of_budgets_home(current: str) -> None:
    rows = (
        ("a", 500, 7, 1, 480, None),
        ("a+0", 90, 60, 2, 240, "a"),
        ("a+1", 0, 0, 0, 240, "a"),
        ("b", 5, 6, 0, 0, None),
    )

    def fill(conn: Connection) -> None:
        for account, held_usd, spent, overrun, escrow, whole in rows:
            values = {"account": account, "held": held_usd, "spent": spent, "overrun": overrun, "escrow": escrow}
            conn.execute(BUDGET_WINDOWS.insert().values(values | {"whole": whole, "start": 0, "end": 9, "budget": "b"}))
        for run, account, usd in (("r", "a", 20), ("r", "a+0", 90), ("s", "b", 5)):
            conn.execute(BUDGET_HOLDS.insert().values(run=run, call=account, account=account, start=0, usd=usd))
        conn.commit()

    ask(current, fill)
    migrate(current, "0032")
    windows = "SELECT account, held, spent, overrun FROM budget_windows ORDER BY account"
    assert ask(current, lambda conn: conn.exec_driver_sql(windows).all()) == [("a", 110, 67, 3), ("b", 5, 6, 0)]
    holds = "SELECT account, sum(usd) FROM budget_holds GROUP BY account ORDER BY account"
    assert ask(current, lambda conn: conn.exec_driver_sql(holds).all()) == [("a", 110), ("b", 5)]


RELEASED = "0011"
"""Head of the migrations of release 0.1.0."""
STATEMENTS = json.loads((Path(__file__).parent / "statements_of_0_1_0.json").read_text())
"""The statements of 0.1.0 that read and write rows, for each dialect, as its tests of the store had them sent."""
CONTRACTS = re.compile(
    r"\b(DROP|RENAME|TYPE|SET NOT NULL|ADD CONSTRAINT|CREATE UNIQUE)\b|ADD COLUMN(?!.*DEFAULT).*NOT NULL"
)
"""Parts of DDL statements that may break a process of the release before."""


def test_every_statement_of_the_release_before_still_works(current: str) -> None:
    """During a rolling upgrade processes of both releases share the database (deploy/docs/decisions.md)."""

    def prepare(conn: Connection) -> None:
        for number, statement in enumerate(STATEMENTS[conn.dialect.name]):
            if conn.dialect.name == "postgresql":
                conn.exec_driver_sql(f"PREPARE released_{number} AS {statement}")
            else:
                conn.exec_driver_sql(f"EXPLAIN {statement}", (None,) * statement.count("?"))

    ask(current, prepare)


@pytest.mark.parametrize("dialect", ["postgresql", "sqlite"])
def test_versions_since_the_last_release_only_expand(dialect: str) -> None:
    """A migration that removes, renames or tightens something has to wait for the next release but one."""
    config = alembic_config("postgresql://nobody@nowhere/none" if dialect == "postgresql" else "sqlite:///none.db")
    config.output_buffer = written = io.StringIO()
    command.upgrade(config, f"{RELEASED}:head", sql=True)
    assert written.getvalue().count("SET LOCAL lock_timeout") == (dialect == "postgresql")
    changes = [line for line in written.getvalue().splitlines() if re.match(r"\s*(ALTER|CREATE|DROP)\b", line)]
    assert changes
    created = re.compile(r"CREATE TABLE")
    assert [line for line in changes if CONTRACTS.search(line) and not created.match(line)] == []


@pytest.mark.parametrize("change", ["ALTER TABLE runs DROP COLUMN key", "ALTER TABLE runs ADD COLUMN a INT NOT NULL"])
def test_a_version_that_contracts_would_be_noticed(change: str) -> None:
    assert CONTRACTS.search(change)


def test_an_update_by_the_release_before_raises_the_revision(current: str) -> None:
    """It does not do so itself: a trigger does, until 0.3. A renewal of a lease raises nothing."""

    def change_run(conn: Connection) -> list[int]:
        names = [column.name for column in METADATA.tables["runs"].columns if column.name != "revision"]
        values = ", ".join("NULL" if METADATA.tables["runs"].c[name].nullable else "'0'" for name in names)
        quoted = ", ".join(f'"{name}"' for name in names)
        conn.exec_driver_sql(f"INSERT INTO runs ({quoted}) VALUES ({values})")
        revisions = []
        for assigned in ("lease_until = 9", "seq = 1, state = 'running'", "salt = NULL", "seq = 2, revision = 7"):
            conn.exec_driver_sql(f"UPDATE runs SET {assigned}")
            revisions.append(conn.exec_driver_sql("SELECT revision FROM runs").scalar_one())
        return revisions

    assert ask(current, change_run) == [0, 1, 2, 7]


@pytest.mark.long
def test_migrating_twice_changes_nothing(current: str) -> None:
    migrate(current)
    assert ask(current, differences) == []


@pytest.mark.long
def test_several_processes_may_migrate_at_once(database: str, tmp_path: Path) -> None:
    environ = processes.environment(tmp_path, BATON_DATABASE_URL=database)
    with ThreadPoolExecutor() as threads:
        racing = [threads.submit(processes.run_command, tmp_path, environ, "migrate") for _ in range(3)]
        assert [racer.result().returncode for racer in racing] == [0, 0, 0]
    assert ask(database, differences) == []


@pytest.mark.long
async def test_several_threads_may_migrate_at_once(database: str) -> None:
    await asyncio.gather(*(asyncio.to_thread(migrate, database) for _ in range(4)))


@pytest.mark.integration
@pytest.mark.long
async def test_a_migration_gives_up_behind_a_long_transaction(copied_postgres_url: str) -> None:
    """If it waited on, the whole service would wait behind it."""
    reader = create_async_engine(parse_url(copied_postgres_url))
    async with reader.connect() as connection:
        await connection.execute(text("SELECT count(*) FROM budgets"))
        with pytest.raises(StoreUnavailable, match="another transaction holds a lock"):
            await asyncio.to_thread(migrate, copied_postgres_url, "0032")
    await reader.dispose()


@pytest.mark.parametrize(
    ("written", "understood"),
    [
        ("sqlite:///baton.db", "sqlite+pysqlite:///baton.db"),
        ("postgresql://u:p@h/db", "postgresql+asyncpg://u:p@h/db"),
        ("postgres://u:p@h:5/db?sslmode=require", "postgresql+asyncpg://u:p@h:5/db?ssl=require"),
        ("postgresql+asyncpg://u@h/db", "postgresql+asyncpg://u@h/db"),
        ("postgresql+psycopg://u@h/db", "postgresql+asyncpg://u@h/db"),
    ],
)
def test_urls_as_people_write_them(written: str, understood: str) -> None:
    assert parse_url(written).render_as_string(hide_password=False) == understood


URLS_OF_NO_USE = (
    "",
    "sqlite://",
    "sqlite:///:memory:",
    "mysql://u:secret@h/db",
    "::",
    "postgresql://u:secret@h:port/db",
    "postgresql://u:secret@h:99999/db",
    "postgresql://u:secret@h/db?sslmode=require&channel_binding=require",
)


@pytest.mark.parametrize("written", URLS_OF_NO_USE)
def test_other_urls_are_refused_without_being_shown(written: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        parse_url(written)
    assert "BATON_DATABASE_URL" in str(refused.value)
    assert "secret" not in str(refused.value)


def sharing_since(conn: Connection) -> float:
    return float(conn.exec_driver_sql("SELECT since FROM forms WHERE name = 'shared'").scalar_one())


@pytest.mark.long
def test_contents_are_stored_in_parts_once_no_process_of_the_release_before_can_be_left(current: str) -> None:
    """Such a process could not read them. It has a day to be replaced, and an empty database has never had one."""
    assert ask(current, sharing_since) == 0.0
    migrate(current, "0016")
    used = "INSERT INTO pulse (id, beats) VALUES (1, 1)"
    ask(current, lambda conn: (conn.exec_driver_sql(used), conn.commit()))
    migrate(current)
    assert abs(ask(current, sharing_since) - time.time() - 86_400) < 600


@pytest.mark.long
async def test_the_way_back_makes_contents_whole(current: str) -> None:
    async with open_store(current) as store:
        await converse(store, 3)
    await asyncio.to_thread(migrate, current, "0016")
    rows = await asyncio.to_thread(
        ask, current, lambda conn: conn.exec_driver_sql("SELECT ref, body FROM contents WHERE run = '3'").all()
    )
    assert {ref: bytes(body) for ref, body in rows} == contents_of("3", 3)
