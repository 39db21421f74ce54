"""Row-level security on Postgres: what is read or changed for a caller, with no condition of its own, are the rows of
one tenant alone."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ProgrammingError

from app.__main__ import main as main_of_baton
from app.core.pool.budgets import Budget
from app.core.rating.feedback import Feedback
from app.core.run.events import Kind
from app.errors import NotFound, StoreUnavailable
from app.store.protocol import Actor, AdminEventQuery, IdempotencyRecord, KeyRow, RunQuery
from app.store.sql import SqlStore, open_store
from app.store.sqlkit import audit_views, revisions
from app.store.sqlkit.migrate import migrate
from app.store.sqlkit.row_security import READABLE
from app.store.sqlkit.tables import METADATA
from tests.conformance.entries import admission_entry, note
from tests.harness.raw_facts import Raw

pytestmark = pytest.mark.integration

OURS, THEIRS = "ours: it's \\ 'quoted' — ü", "other"
RUNS = {"our-run": OURS, "their-run": THEIRS}
COPIES = 400
"""Enough rows for the planner to prefer an index wherever there is one that fits."""


@pytest.fixture
async def store(migrated_postgres_url: str) -> AsyncIterator[SqlStore]:
    """Two tenants with one run each, which has a row in every table that callers may read."""
    async with open_store(migrated_postgres_url) as opened:
        for run, tenant in RUNS.items():
            once = IdempotencyRecord(f"claim of {run}", b"", 1e12, tenant=tenant)
            entry = replace(admission_entry(run, tenant=tenant), once=once, tags=(("label", "red"),))
            await opened.append(replace(entry, contents=(("ref", run.encode()),)))
            await opened.rate(Feedback(f"fb of {run}", run, tenant, "key", 5.0, "explicit", "user", "", 1.0))
            await opened._write(fill_of(run, tenant))
        yield opened


def fill_of(run: str, tenant: str) -> Any:
    """Rows of the tables that a conversation and a pruned run leave."""

    def work(conn: Connection) -> None:
        mine = {"run": run, "tenant": tenant}
        for statement in (
            "INSERT INTO shared_contents (run, ref, owner, size, body) VALUES (:run, 'part', 1, 0, '')",
            "INSERT INTO texts (id, spoken, body, tenant) VALUES ('text of ' || :run, false, '', :tenant)",
            "INSERT INTO pruned_runs (id, tenant, state, created_at, ended_at, pruned_at, events, root, archive) "
            "VALUES ('pruned ' || :run, :tenant, 'failed', 1, 1, 1, 1, '', '')",
            "INSERT INTO disclosures (run, call, at, kind, recipient, provider, model, region, tenant, key, saw_user, "
            "saw_steps, saw_results, unseen, planned_by, attempt, bytes) "
            "VALUES (:run, 'c', 1, 'worker', 'w', 'p', 'm', '', :tenant, 'k', true, '', false, '', 'fixed', 1, 1)",
            "INSERT INTO keys (id, tenant, name, digest, scopes, tiers, labels, created_at) "
            "VALUES ('key of ' || :run, :tenant, 'ci', '', '[]', '[]', '[]', 1)",
            "INSERT INTO tenants (name, created_at) VALUES (:tenant, 1)",
            "INSERT INTO budgets (id, tenant, scope, name, period, usd, zone, created_at) "
            "VALUES ('budget of ' || :run, :tenant, 'user', 'ann', 'day', 1, 'UTC', 1)",
            "INSERT INTO budget_windows VALUES ('account of ' || :run, 1, 'budget of ' || :run, 2, 0, 0, 0)",
            "INSERT INTO admin_events (at, actor, via, action, target, tenant) "
            "VALUES (1, 'ann', 'key', 'key.added', 'key of ' || :run, :tenant)",
            "INSERT INTO holds (id, scope, name, tenant, reason, placed_at, placed_by) "
            "VALUES ('hold of ' || :run, 'run', :run, :tenant, 'case 12', 1, 'ann')",
        ):
            conn.execute(text(statement), mine)

    return work


async def count_rows(store: SqlStore, tenant: str | None) -> dict[str, int]:
    """The rows of each table that a read without any condition finds."""

    def work(conn: Connection) -> dict[str, int]:
        return {table: conn.execute(text(f"SELECT count(*) FROM {table}")).scalar_one() for table in READABLE}

    return await store.read_for(tenant, work)


async def test_a_read_without_any_condition_finds_the_rows_of_one_tenant(store: SqlStore) -> None:
    assert set((await count_rows(store, None)).values()) == {2}
    assert set((await count_rows(store, OURS)).values()) == {1}
    assert set((await count_rows(store, "")).values()) == {0}


async def test_what_another_tenant_has_is_absent(store: SqlStore) -> None:
    ours = store.of_tenant(OURS)
    assert (await ours.run("our-run")).tenant == OURS
    assert [row.id for row in await ours.runs(RunQuery())] == ["our-run"]
    assert await ours.contents("our-run", ["ref"]) == {"ref": b"our-run"}
    for absent in (ours.run("their-run"), ours.journal("their-run"), ours.pruned_run("pruned their-run")):
        with pytest.raises(NotFound):
            await absent
    assert await ours.contents("their-run", ["ref"]) == {}
    assert await ours.records("their-run", [("ref", len)]) == {}
    assert await ours.feedback("their-run") == ()
    assert await ours.find_idempotency_record("claim of their-run", 0.0) is None
    assert await ours.find_idempotency_record("claim of our-run", 0.0) is not None


async def test_a_connection_is_the_services_again_after_a_read_for_a_caller(store: SqlStore) -> None:
    assert set((await count_rows(store, OURS)).values()) == {1}
    role = await store._read(lambda conn: conn.execute(text("SELECT current_user, session_user")).one())
    assert role[0] == role[1]
    assert set((await count_rows(store, None)).values()) == {2}


async def test_readers_may_not_write(store: SqlStore) -> None:
    def write(conn: Connection) -> None:
        conn.execute(text("UPDATE runs SET error = 'x'"))

    with pytest.raises(StoreUnavailable):
        await store.read_for(OURS, write)


async def test_a_change_without_any_condition_reaches_the_rows_of_one_tenant(store: SqlStore) -> None:
    for statement in (
        "UPDATE keys SET name = 'x'",
        "UPDATE budgets SET usd = 2",
        "UPDATE budget_windows SET warned_at = 1",
        "UPDATE once SET until = 1",
        "DELETE FROM budgets",
    ):
        changed = await store.write_for(OURS, lambda conn, sql=statement: conn.execute(text(sql)).rowcount)
        assert changed == 1, statement
    assert (await count_rows(store, None))["budgets"] == 1
    for statement in (
        "UPDATE runs SET error = 'x'",
        "UPDATE holds SET released_at = 1",
        "DELETE FROM keys",
        "SELECT * FROM notices",
        "SELECT * FROM content_keys",
    ):
        with pytest.raises(StoreUnavailable):
            await store.write_for(OURS, lambda conn, sql=statement: conn.execute(text(sql)))


async def test_nothing_is_given_to_another_tenant(store: SqlStore) -> None:
    ours = store.administration_of(OURS)
    theirs = KeyRow("new", THEIRS, "n", b"", frozenset(), 1.0)
    assert await ours.add_key(replace(theirs, tenant=OURS))
    once = IdempotencyRecord("new claim", b"", 1e12, tenant=THEIRS)
    for refused in (
        ours.add_key(replace(theirs, id="newer")),
        ours.set_budget(Budget(THEIRS, "user", "ann", "day", 5)),
        ours.note_read("their-run", THEIRS, "answer", by=Actor("ann", "key")),
        store.of_tenant(OURS).add_idempotency_record(once, 0.0),
    ):
        with pytest.raises(NotFound):
            await refused
    assert store.healthy, "a refusal says nothing about the database"
    assert await ours.key("key of their-run") is None
    assert not await ours.revoke_key("key of their-run", 2.0)
    assert not await ours.rotate_key("key of their-run", b"x", 2.0)
    assert not await ours.remove_budget("budget of their-run")
    assert [row.id for row in await ours.keys()] == ["new", "key of our-run"]
    assert [row.name for row in await ours.tenants()] == [OURS]
    assert [row.target for row in await ours.admin_events(AdminEventQuery())] == ["new", "key of our-run"]
    assert await ours.budget_use("budget of their-run", 5) == ()
    [window] = await ours.budget_use("budget of our-run", 5)
    assert window.account == "account of our-run"
    assert [row.id for row in await store.administration_of(None).holds()] == ["hold of their-run", "hold of our-run"]


async def plan(store: SqlStore, statement: str, **values: Any) -> str:
    def work(conn: Connection) -> str:
        return "\n".join(conn.execute(text(f"EXPLAIN {statement}"), values).scalars())

    return await store.read_for(OURS, work)


async def test_every_policy_is_checked_by_an_index(store: SqlStore) -> None:
    """Else a read for a caller would take the longer the more other tenants have stored."""
    await store._write(fillers)
    await store._write(lambda conn: conn.execute(text("ANALYZE")))
    by_run = {"events": "run = 'our-run'", "contents": "run = 'our-run' AND ref = 'ref'"}
    by_run |= {"shared_contents": "run = 'our-run' AND ref = 'part'", "feedback": "run = 'our-run'"}
    keys = {"texts": "id = 'x'", "once": "id = 'x'", "runs": "id = 'our-run'", "pruned_runs": "id = 'x'"}
    keys |= {"keys": "id = 'x'", "tenants": "name = 'x'", "budgets": "id = 'x'", "holds": "id = 'x'"}
    tags = {"tags": "name = 'label' AND value = 'red' AND run = 'our-run'"}
    windows = {"budget_windows": "budget = 'budget of our-run'", "admin_events": "target = 'x'"}
    for table, condition in (by_run | keys | tags | windows).items():
        plan_lines = await plan(store, f"SELECT * FROM {table} WHERE {condition}")
        assert "Seq Scan" not in plan_lines, plan_lines
        if table in ("events", "contents", "shared_contents", "tags"):
            assert "runs_pkey" in plan_lines, plan_lines
        if table == "budget_windows":
            assert "budgets_pkey" in plan_lines, plan_lines
    newest = "ORDER BY created_at DESC, id DESC LIMIT 20"
    listed = await plan(store, f"SELECT * FROM runs WHERE tenant = :tenant {newest}", tenant=OURS)
    assert "runs_by_tenant" in listed, listed
    for table, ordered in LISTS.items():
        listed = await plan(store, f"SELECT * FROM {table} WHERE tenant = :tenant ORDER BY {ordered}", tenant=OURS)
        assert f"{table}_by_tenant" in listed, listed


LISTS = {
    "keys": "created_at DESC, id DESC LIMIT 20",
    "budgets": "id LIMIT 20",
    "admin_events": "seq DESC LIMIT 20",
    "holds": "placed_at DESC, id DESC LIMIT 20",
}
"""The lists of the administration, in the order in which their pages are read."""


NAMES = dict.fromkeys(READABLE, "run") | dict.fromkeys(("tenants",), "name") | {"budget_windows": "account"}
NAMES |= dict.fromkeys(("runs", "pruned_runs", "feedback", "texts", "once", "keys", "budgets", "holds"), "id")
NAMES |= {"admin_events": "target"}
"""The column of each table by which the copies of a row are told apart."""


def fillers(conn: Connection) -> None:
    """Many rows of the other tenant in all tables: copies of its own, under other ids."""
    for table, name in NAMES.items():
        own = {"feedback": "'run', 'their-run' || n", "admin_events": "'seq', 1000 + n"}.get(table, "")
        renamed = f"jsonb_build_object('{name}', old.{name} || n) || jsonb_build_object({own})"
        copied = f"(jsonb_populate_record(old, {renamed})).*"
        mine = f"old.{name} LIKE '%their-run' OR old.{name} = '{THEIRS}'"
        many = f"generate_series(1, {COPIES}) AS n"
        conn.execute(text(f"INSERT INTO {table} SELECT {copied} FROM {table} AS old, {many} WHERE {mine}"))


@pytest.fixture
async def owner_url(postgres_url: str) -> str:
    """A migrated database whose owner is no superuser and may not create roles, as on some managed servers."""
    server = make_url(postgres_url)
    user = f"owner_{server.database}"
    admin = await asyncpg.connect(postgres_url)
    try:
        await admin.execute(f"""CREATE ROLE "{user}" LOGIN PASSWORD 'secret'""")
        await admin.execute(f'ALTER DATABASE "{server.database}" OWNER TO "{user}"')
    finally:
        await admin.close()
    own = server.set(username=user, password="secret").render_as_string(hide_password=False)
    await asyncio.to_thread(migrate, own)
    return own


@pytest.mark.long
async def test_the_owner_of_the_tables_reads_for_a_caller_under_the_same_policies(owner_url: str) -> None:
    """FORCE binds the owner, so that nothing depends on a role of readers. Everything else sees all rows by indexes."""
    state = await asyncio.to_thread(revisions.row_security, owner_url)
    assert (state.reader, state.reason) == (make_url(owner_url).username, "")
    async with open_store(owner_url) as store:
        for run, tenant in RUNS.items():
            await store.append(replace(admission_entry(run, tenant=tenant), tags=(("label", "red"),)))
            await store._write(fill_of(run, tenant))
        mine = await count_rows(store, OURS)
        assert {table for table, rows in mine.items() if rows != 1} == {"feedback", "contents", "once"}, "none was made"
        assert set((await count_rows(store, "")).values()) == {0}
        assert (await count_rows(store, None))["events"] == 2
        with pytest.raises(NotFound):
            await store.of_tenant(OURS).run("their-run")
        with pytest.raises(StoreUnavailable):
            await store.read_for(OURS, lambda conn: conn.execute(text("UPDATE runs SET error = 'x'")))
        assert await store.write_for(OURS, lambda conn: conn.execute(text("UPDATE keys SET name = 'x'")).rowcount) == 1
        with pytest.raises(NotFound):
            await store.administration_of(OURS).add_key(KeyRow("new", THEIRS, "n", b"", frozenset(), 1.0))
        forced = "SELECT relname FROM pg_class WHERE relforcerowsecurity AND relrowsecurity"
        runs = set(await store._read(lambda conn: conn.execute(text(forced)).scalars().all()))
        listed = list_documented_tables()
        assert runs == {*READABLE, "content_keys"} == {table for table, is_forced in listed.items() if is_forced}
        assert set(listed) == set(METADATA.tables), "deploy/docs/security.md lists every table"
        await store._write(fillers)
        await store._write(lambda conn: conn.execute(text("ANALYZE")))
        for statement in BY_INDEX:
            explained = await store._read(lambda conn, sql=statement: conn.execute(text(f"EXPLAIN {sql}")).scalars())
            assert "Seq Scan" not in "\n".join(explained), statement


def list_documented_tables() -> dict[str, bool]:
    """The tables of the list in `security.md`, and whether it says that row-level security is forced."""
    words = (Path(__file__).parents[2] / "deploy/docs/security.md").read_text()
    rows = re.findall(r"^\| (`[a-z_`, ]+) \| (yes|no) \|", words, re.MULTILINE)
    return {table: forced == "yes" for tables, forced in rows for table in re.findall(r"`([a-z_]+)`", tables)}


BY_INDEX = (
    "SELECT * FROM events WHERE run = 'our-run' AND seq > 0",
    "SELECT * FROM runs WHERE id = ANY(ARRAY['our-run', 'their-run1'])",
    "SELECT * FROM runs WHERE id > 'x' AND state NOT IN ('succeeded', 'failed', 'cancelled', 'expired', 'over_budget')",
    "UPDATE runs SET error = 'x' WHERE id = 'our-run' AND epoch = 1",
    "SELECT * FROM keys WHERE id = 'key of our-run'",
    "SELECT * FROM budgets WHERE id = 'budget of our-run'",
    "UPDATE budget_windows SET held = held + 1 WHERE account = 'account of our-run' AND start = 1",
)
"""Statements of the kind that engines and sweepers send."""


@pytest.mark.long
async def test_a_role_of_readers_is_used_once_the_user_may_make_it(owner_url: str, postgres_url: str) -> None:
    server = make_url(owner_url)
    admin = await asyncpg.connect(postgres_url)
    await admin.execute(f'ALTER ROLE "{server.username}" CREATEROLE')
    await admin.close()
    await asyncio.to_thread(migrate, owner_url)
    statements_run = await asyncio.to_thread(revisions.row_security, owner_url)
    assert (statements_run.reader, statements_run.reason) == (f"baton_reader_{server.database}", "")
    async with open_store(owner_url) as store:
        await store.append(admission_entry("their-run", tenant=THEIRS))
        assert (await store.of_tenant(THEIRS).run("their-run")).tenant == THEIRS
        with pytest.raises(NotFound):
            await store.of_tenant(OURS).run("their-run")


async def test_a_role_of_auditors_reads_the_views_and_no_text(store: SqlStore, migrated_postgres_url: str) -> None:
    role = f"auditor_{make_url(migrated_postgres_url).database}"
    await store._write(lambda conn: conn.execute(text(f"CREATE ROLE {role} NOLOGIN")))
    words = ["audit", "views", "--role", role]
    assert await asyncio.to_thread(main_of_baton, words, {"BATON_DATABASE_URL": migrated_postgres_url}) == 0

    def read(what: str) -> Any:
        def work(conn: Connection) -> Any:
            conn.execute(text(f"SET LOCAL ROLE {role}"))
            return conn.execute(text(what)).all()

        return store._write(work)

    assert {row.tenant for row in await read("SELECT * FROM audit_runs")} == {OURS, THEIRS}
    [row] = await read("SELECT * FROM audit_disclosures WHERE run = 'our-run'")
    assert (row.recipient, row.saw_user, row.labels, row.saw_steps) == ("w", True, [], None)
    assert await read("SELECT body ->> 'tier' FROM audit_events WHERE run = 'our-run'")
    await store.release_hold("hold of our-run", 2.0)
    assert await store.erase("our-run")
    assert await read("SELECT id, erased_by FROM audit_runs WHERE erased_at IS NOT NULL") == [("our-run", "request")]
    pruned = "SELECT id, archive FROM audit_pruned_runs WHERE tenant = 'other' AND pruned_at < '1970-01-02'"
    assert await read(pruned) == [("pruned their-run", None)]
    escaped = {"error": "a NUL: \0, and none: \\u0000"}
    await store.append(replace(note("our-run"), events=(Raw(Kind.CANCEL_ASKED, escaped),)))
    [(shown,)] = await read("SELECT body ->> 'error' FROM audit_events WHERE body ->> 'error' IS NOT NULL")
    assert shown == "a NUL: \ufffd, and none: \\u0000"
    assert "salt" not in (await read("SELECT * FROM audit_runs"))[0]._mapping
    for table in (*READABLE, "keys"):
        with pytest.raises((ProgrammingError, StoreUnavailable)):
            await read(f"SELECT * FROM {table}")
    await store._write(lambda conn: conn.execute(text(f"DROP OWNED BY {role}")))
    await store._write(lambda conn: conn.execute(text(f"DROP ROLE {role}")))


@pytest.mark.long
async def test_a_change_of_the_views_does_not_wait_for_a_long_reading_of_them(
    owner_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All who came later would wait behind it."""
    monkeypatch.setattr(revisions, "LOCK_SECONDS", 0.01)
    await asyncio.to_thread(revisions.change, owner_url, lambda conn: audit_views.make(conn, None))
    auditor = await asyncpg.connect(owner_url)
    async with auditor.transaction():
        await auditor.execute("SELECT count(*) FROM audit_runs")
        with pytest.raises(StoreUnavailable, match="another transaction holds a lock"):
            await asyncio.to_thread(revisions.change, owner_url, audit_views.drop)
    await auditor.close()
    await asyncio.to_thread(revisions.change, owner_url, audit_views.drop)
