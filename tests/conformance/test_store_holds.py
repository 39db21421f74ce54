"""Legal holds: nothing that one covers is erased, pruned or deleted, on SQLite and on Postgres."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine

from app.core.contents import content_ref
from app.core.run.events import Kind
from app.errors import LegalHold, NotFound
from app.store.archive import open_archive
from app.store.protocol import PROCESS, USER_TAG, Actor, AdminEventQuery, ContentQuery, Hold, HoldScope, PruneQuery
from app.store.rows import content, end_users
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.runner import parse_url
from app.store.sqlkit.sealing import place_of
from tests.conformance.entries import SALT, Opener
from tests.conformance.test_store_retention import admission, end_run, fill, find_rest_of, runs_selected
from tests.harness.raw_facts import Raw
from tests.harness.sealing import seal_all
from tests.harness.waiting import PATIENCE_SECONDS

CLERK = Actor("clerk", "command")
LATER = PruneQuery(ended_before=99.0, deadline_before=9e9)
Work = Callable[[Connection], object]


def hold(scope: HoldScope, name: str, tenant: str = "") -> Hold:
    return Hold(f"hold_{scope}", scope, name, tenant, "case 12", placed_at=5.0, placed_by="")


async def add_runs(store: SqlStore) -> None:
    """Two runs that have ended: of ann in one tenant, and of bob in another one."""
    tagged = replace(admission("mine"), tags=((USER_TAG, "ann"),))
    await fill(store, [tagged, admission("other", "bob", tenant="else"), end_run("mine", 2.0), end_run("other", 2.0)])


@pytest.mark.parametrize("scope", ["run", "user", "tenant", "key"])
@pytest.mark.long
async def test_what_a_hold_covers_outlasts_every_way_of_removal(
    store: SqlStore, database: str, scope: HoldScope
) -> None:
    await add_runs(store)
    row = await store.run("mine")
    names = {"run": "mine", "user": "ann", "tenant": "tenant", "key": row.key}
    if scope == "key":  # both runs have the key of the same name, which need not be stored
        await store._write(lambda conn: conn.execute(text("UPDATE runs SET key = 'theirs' WHERE id = 'other'")))
        await store._write(lambda conn: conn.execute(KEY_ROW, {"id": row.key}))
    placed = await store.place_hold(hold(scope, names[scope]), by=CLERK)
    assert placed.tenant == ("" if scope == "user" else "tenant")
    assert await store.find_holds_by_run(["mine", "other", "none"]) == {"mine": placed.id}
    refs = [admission("mine").contents[0][0]]
    assert await store.erase_contents(["mine", "other"]) == 1
    with pytest.raises(LegalHold, match=placed.id):
        await store.erase("mine")
    with pytest.raises(LegalHold, match=placed.id):
        await store.of_tenant("tenant").erase("mine")
    with pytest.raises(LegalHold, match=placed.id):
        await store.destroy_content_keys("tenant")
    await seal_all(store)
    async with open_archive(database) as archive:
        assert (await archive.count_prunable(LATER))[0] == 1
    assert await store.prune([await find_rest_of(store, run) for run in ("mine", "other")]) == ["other"]
    assert len(await store.contents("mine", refs)) == 1
    assert await runs_selected(store, ContentQuery()) == ["mine"]

    released = await store.release_hold(placed.id, 9.0, by=Actor("boss", "key"))
    assert (released.released_at, released.released_by) == (9.0, "boss")
    assert await store.release_hold(placed.id, 10.0) == released
    assert (await store.holds(), await store.count_released_holds()) == ((released,), 1)
    assert await store.erase("mine")
    assert await store.prune([await find_rest_of(store, "mine")]) == ["mine"]
    logged = await store.admin_events(AdminEventQuery(target=placed.id))
    assert [(event.action, event.actor) for event in logged] == [("hold.released", "boss"), ("hold.placed", "clerk")]


KEY_ROW = text(
    "INSERT INTO keys (id, tenant, name, digest, scopes, tiers, labels, created_at) "
    "VALUES (:id, 'tenant', 'ci', '', '[]', '[]', '[]', 1.0)"
)


async def test_a_hold_on_a_key_of_all_tenants_covers_its_runs_in_every_tenant(store: SqlStore) -> None:
    """Such a key may replay a run of another tenant, and the replay belongs to that tenant."""
    await add_runs(store)
    key = (await store.run("other")).key
    await store._write(lambda conn: conn.execute(KEY_ROW, {"id": key}))
    placed = await store.place_hold(hold("key", key), by=CLERK)
    assert placed.tenant == "tenant"
    assert (await store.find_holds_by_run(["other"])) == {"other": placed.id}
    with pytest.raises(LegalHold, match=placed.id):
        await store.destroy_content_keys("else")


async def test_a_run_whose_user_has_no_tag_is_held_by_its_task(store: SqlStore) -> None:
    """Releases before the tags of users wrote none, and a name may be too long for one."""
    await fill(
        store,
        [admission("old"), admission("hashed", None, identifier="ann"), admission("bob", "bob"), end_run("old", 2.0)],
    )
    await store.place_hold(hold("user", "ann", "tenant"), by=CLERK)
    assert set(await store.find_holds_by_run(["old", "hashed", "bob"])) == {"old", "hashed"}
    assert await store.erase_contents(["old", "hashed", "bob"]) == 1
    assert await store.prune([await find_rest_of(store, "old")]) == []


async def test_a_hold_on_a_user_of_one_tenant_leaves_the_same_name_of_another(store: SqlStore) -> None:
    await fill(store, [admission("mine"), admission("theirs", tenant="else")])
    await store.place_hold(hold("user", "ann", "else"), by=CLERK)
    assert set(await store.find_holds_by_run(["mine", "theirs"])) == {"theirs"}


async def test_encrypted_tasks_are_held_by_their_user(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read one after the other where they are large, and nothing else of these runs is."""
    monkeypatch.setattr(end_users, "READ_BYTES", 1)
    master, places = bytes(32), []
    answer = b'{"messages": [], "user": "ann"}'
    async with (
        open_store(database, content_keys=[master]) as store,
        open_store(database, content_keys=[master]) as other,
    ):
        mine, bob = admission("mine"), admission("bob", "bob")
        task = Raw(Kind.ADMITTED, {"tier": "mini", "task": bob.contents[0][0]})
        contents = (*bob.contents, (content_ref(SALT, answer), answer))
        await fill(store, [mine, replace(bob, events=(task,), contents=contents)])
        await other.place_hold(hold("user", "ann"), by=CLERK)

        def decrypt(place: str, body: bytes) -> bytes | None:
            places.append(place)
            return store._decrypt(place, body)

        runs = ["mine", "bob"]
        assert await store._read(lambda conn: end_users.of_runs(conn, ["ann"], runs, decrypt)) == {"mine": {"ann"}}
        assert sorted(places) == sorted(place_of(entry.run, entry.contents[0][0]) for entry in (mine, bob))
        assert await other.erase_contents(runs) == 1


async def test_a_hold_names_something_that_there_is(store: SqlStore) -> None:
    await add_runs(store)
    for placed in (hold("run", "none"), hold("tenant", "nobody"), hold("key", "none"), hold("user", "ann", "nobody")):
        with pytest.raises(NotFound):
            await store.place_hold(placed, by=CLERK)
    with pytest.raises(NotFound):
        await store.release_hold("none", 1.0)
    assert await store.holds() == ()


async def test_a_hold_is_placed_after_the_erasures_that_are_under_way(opener: Opener, database: str) -> None:
    """An erasure that has asked for holds is committed before one is placed, so none is broken once it is in force."""
    if database.startswith("sqlite"):
        pytest.skip("SQLite has one writer at a time")
    engine = create_async_engine(parse_url(database))
    async with opener() as store, engine.connect() as conn:
        await add_runs(store)
        await conn.begin()
        erased: Work = partial(
            content.erase,
            statements=store._statements,
            runs=["mine"],
            decrypt=store._decrypt,
            cause="operator",
            by=PROCESS,
        )
        await conn.run_sync(erased)
        placing = asyncio.ensure_future(store.place_hold(hold("run", "other"), by=CLERK))
        waits = text("SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await store._read(lambda conn: conn.execute(waits).scalar_one()):
                pass
        assert not placing.done()
        await conn.commit()
        await placing
    await engine.dispose()
