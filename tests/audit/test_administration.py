"""Whoever changes a key or a tenant past the log of changes is caught, and the log itself cannot be altered."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from app.audit.administration import OLDER
from app.audit.check import Auditor
from app.audit.report import Report
from app.core.pool.budgets import Budget
from app.core.pool.conductor_versions import Change
from app.errors import RecordDamaged
from app.providers.formats import adapter
from app.store.archive import open_archive
from app.store.protocol import Actor, AdminEventQuery, KeyRow
from app.store.sql import open_store
from tests.conformance.entries import admission_entry

ANNA = Actor("anna", "command")
KEY = KeyRow("k1", "acme", "ci", b"digest", frozenset({"runs:read"}), 5.0, labels=frozenset({"phi"}), max_usd=7)


async def audit_file(path: Path) -> Report:
    async with open_archive(f"sqlite:///{path}") as archive:
        return await Auditor(100.0, adapter).audit(archive)


@pytest.fixture
async def database(tmp_path: Path) -> Path:
    """A database with a key that was rotated, a revoked one, a disabled tenant, and a promoted conductor."""
    path = tmp_path / "baton.db"
    async with open_store(f"sqlite:///{path}") as store:
        assert await store.add_key(KEY, by=ANNA)
        assert await store.rotate_key("k1", b"second", 50.0, "mark", by=ANNA)
        assert await store.rehash_key("k1", was=b"second", digest=b"third", pepper="other")
        assert await store.add_key(replace(KEY, id="k2", name="cd"))
        assert await store.revoke_key("k2", 9.0, by=ANNA)
        assert await store.add_tenant("acme", 3.0, by=ANNA)
        assert await store.switch_tenant("acme", 8.0, enabled=False, by=ANNA)
        await store.set_budget(Budget("acme", "tenant", "", "day", 5_000_000), by=ANNA)
        await store.set_budget(Budget("acme", "tenant", "", "day", 6_000_000), by=ANNA)
        await store.set_budget(Budget("acme", "key", "k1", "hour", 7), by=ANNA)
        await store.remove_budget("acme/key/k1/hour", by=ANNA)
        await store.set_budget(Budget("acme", "key", "k1", "hour", 8), by=ANNA)
        await store.note_retention({"content": "30", "events": "never", "classes": ""})
        await store.change(Change("c1", 20.0, "anna", "planner", "promoted", "v2"))
    return path


async def test_an_entry_of_the_log_that_cannot_be_read_is_named(database: Path) -> None:
    with closing(sqlite3.connect(database)) as conn, conn:
        conn.execute("DROP TRIGGER admin_events_kept_update")
        conn.execute("UPDATE admin_events SET after = CAST('no json' AS BLOB) WHERE seq = 3")
    async with open_store(f"sqlite:///{database}") as store:
        with pytest.raises(RecordDamaged, match="The entry 3 of the log of changes cannot be read"):
            await store.admin_events(AdminEventQuery())
        assert len(await store.admin_events(AdminEventQuery(target="k2"))) == 2


@pytest.mark.parametrize("scopes", ["admin", "7"])
async def test_a_key_that_cannot_be_read_is_named(database: Path, scopes: str) -> None:
    with closing(sqlite3.connect(database)) as conn, conn:
        conn.execute("UPDATE keys SET scopes = ? WHERE id = 'k1'", (scopes,))
    async with open_store(f"sqlite:///{database}") as store:
        for read in (store.keys(), store.key("k1")):
            with pytest.raises(RecordDamaged, match="The API key k1 cannot be read"):
                await read
        assert await store.key("k2") is not None


async def test_what_was_changed_through_the_service_agrees_with_its_log(database: Path) -> None:
    report = await audit_file(database)
    assert [str(violation) for violation in report.violations] == []
    assert report.unverifiable.total() == 0


@pytest.mark.parametrize(
    ("statement", "violation_text"),
    [
        ("UPDATE keys SET scopes = '[\"admin\"]' WHERE id = 'k1'", "key k1 seq 3 change-unlogged: scopes"),
        ("UPDATE keys SET scopes = 'admin' WHERE id = 'k1'", "key k1 seq 3 change-unlogged: scopes"),
        ("UPDATE keys SET digest = x'00' WHERE id = 'k1'", "key k1 seq 3 change-unlogged: digest"),
        ("UPDATE keys SET revoked_at = NULL WHERE id = 'k2'", "key k2 seq 5 change-unlogged: revoked_at"),
        ("UPDATE keys SET id = 'k9' WHERE id = 'k1'", "key k9 seq 0 change-unlogged: nothing in the log"),
        ("DELETE FROM keys WHERE id = 'k2'", "key k2 seq 0 change-unlogged: the log has the key"),
        ("UPDATE tenants SET disabled_at = NULL", "tenant acme seq 7 change-unlogged: disabled_at"),
        ("UPDATE budgets SET usd = 9 WHERE scope = 'tenant'", "budget acme/tenant/-/day seq 9 change-unlogged: usd"),
        ("DELETE FROM budgets WHERE scope = 'key'", "budget acme/key/k1/hour seq 0 change-unlogged: the log has"),
        ("UPDATE conductor_changes SET version = 'v3'", "conductor planner seq 0 change-unlogged: the change c1"),
        ("DELETE FROM conductor_changes", "conductor planner seq 14 change-unlogged: the log has the change c1"),
    ],
)
async def test_a_change_past_the_log_is_caught(database: Path, statement: str, violation_text: str) -> None:
    with closing(sqlite3.connect(database)) as conn, conn:
        conn.execute(statement)
    assert any(str(violation).startswith(violation_text) for violation in (await audit_file(database)).violations)


async def test_the_log_cannot_be_altered_and_contradicts_itself_where_it_was(database: Path) -> None:
    conn = sqlite3.connect(database)
    for statement in ("UPDATE admin_events SET actor = 'nobody'", "DELETE FROM admin_events"):
        with pytest.raises(sqlite3.IntegrityError, match="only added to"):
            conn.execute(statement)
    conn.execute("DROP TRIGGER admin_events_kept_delete")
    conn.execute("DELETE FROM admin_events WHERE action = 'key.rotated'")
    conn.commit()
    conn.close()
    assert (await audit_file(database)).rules == {"change-log-broken": 1}


async def test_a_change_in_the_log_that_names_no_change_is_caught(database: Path) -> None:
    conn = sqlite3.connect(database)
    conn.execute("DROP TRIGGER admin_events_kept_update")
    conn.execute("UPDATE admin_events SET after = CAST('{\"change\": []}' AS BLOB) WHERE action = 'conductor.promoted'")
    conn.commit()
    conn.close()
    assert (await audit_file(database)).rules == {"change-unlogged": 2}


async def test_a_key_from_before_the_log_cannot_be_verified(database: Path) -> None:
    conn = sqlite3.connect(database)
    conn.execute("UPDATE forms SET since = 1000 WHERE name = 'admin_events'")
    conn.execute(
        "INSERT INTO keys (id, tenant, name, digest, scopes, tiers, labels, created_at)"
        " SELECT 'old', tenant, 'old', digest, scopes, tiers, labels, 900 FROM keys WHERE id = 'k1'"
    )
    conn.commit()
    conn.close()
    report = await audit_file(database)
    assert report.is_clean
    assert report.unverifiable == {OLDER: 1}


async def test_readings_and_erasures_are_no_history_of_anything_that_is_stored(database: Path) -> None:
    """There may be millions of them, which an audit does not hold in memory."""
    async with open_store(f"sqlite:///{database}") as store:
        await store.append(admission_entry("run_1"))
        await store.note_read("run_1", "tenant", "answer", by=ANNA)
        assert await store.erase("run_1", by=ANNA)
    async with open_archive(f"sqlite:///{database}") as archive:
        administration = await archive.administration()
    assert not [event for event in administration.events if event["action"].startswith("content.")]
    assert "change-unlogged" not in (await audit_file(database)).rules
