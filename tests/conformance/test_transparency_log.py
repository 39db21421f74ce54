"""Everything that is committed is sealed once, and is proven by the checkpoint, on SQLite and on Postgres."""

import asyncio
from hashlib import blake2b
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, insert, select, text

from app.core.rating.feedback import Feedback
from app.core.run.journal_hash import root as events_root
from app.core.transparency.leaves import Leaf, commitment, parse_leaf
from app.core.transparency.merkle import includes, leaf_hash, tree_root
from app.core.transparency.notes import Checkpoint, Signer, Verifier, open_checkpoint
from app.core.transparency.tiles import hashes_of
from app.store.protocol import USER_TAG, KeyRow, PrunedRun
from app.store.rows import log_sources, transparency_log
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.tables import DISCLOSURES, EVENTS, FEEDBACK, LOG_LEAVES, RUNS
from app.store.writing import log_writer
from tests.conformance.entries import SALT, Opener, admission_entry, note

SIGNER = Signer("log.example/baton", bytes(range(32)))
numbers = iter(count())
KEY = KeyRow("key1", "tenant", "name", b"d" * 32, frozenset({"admin"}), created_at=1.0)


def new_salts() -> bytes:
    return blake2b(str(next(numbers)).encode(), digest_size=16).digest()


async def seal(store: SqlStore) -> int:
    """Seal all that waits. Returns the number of new entries."""
    count = 0
    while (sealed := await store.log.seal([SIGNER], new_salts)) is not None:
        count += sealed.leaves
        if not sealed.more:
            break
    return count


async def leaves(store: SqlStore) -> list[Leaf]:
    """All entries, bundle by bundle."""
    entries: list[bytes] = []
    while len(entries) % 256 == 0 and (bundle := await store.log.entries(len(entries) // 256)):
        entries += bundle
    return [parse_leaf(entry) for entry in entries]


async def sealed_runs(store: SqlStore) -> dict[str, list[int]]:
    """Each run with the numbers of events at which it was sealed."""
    runs: dict[str, list[int]] = {}
    for leaf in await leaves(store):
        if leaf.kind == "run":
            runs.setdefault(leaf.id, []).append(leaf.events)
    return runs


async def checkpoint(store: SqlStore, verifier: Verifier = SIGNER.verifier) -> Checkpoint:
    state = await store.log.state()
    assert state.checkpoint is not None
    return open_checkpoint(state.checkpoint, [verifier])


async def fetch_rows(store: SqlStore, query: Any) -> list[dict[str, Any]]:
    rows = await store._read(lambda conn: conn.execute(query).mappings().all())
    mappings = []
    for row in rows:
        mappings.append({str(name): value for name, value in row.items()})
    return mappings


async def test_a_run_is_proven_by_its_events_and_its_row(store: SqlStore) -> None:
    await store.append(replace(admission_entry("run"), tags=((USER_TAG, "ann"),)))
    await seal(store)
    await store.append(note("run"))
    await seal(store)
    head, proof = await checkpoint(store), await store.log.proof("run")
    assert proof.checkpoint == (await store.log.state()).checkpoint
    for proven in proof.leaves:
        assert includes(proven.place, head.size, leaf_hash(proven.entry), proven.proof, head.root)
    first, second = [parse_leaf(leaf.entry) for leaf in proof.leaves]
    (row,), events = (
        await fetch_rows(store, select(RUNS)),
        await fetch_rows(store, select(EVENTS).order_by(EVENTS.c.seq)),
    )
    journal = [(event["seq"], event["kind"], event["at"], event["body"]) for event in events]
    assert (first.events, first.root) == (1, events_root("run", journal[:1]))
    assert (second.events, second.root) == (2, events_root("run", journal))
    names = ("id", "tenant", "key", "tier", "model", "code", "created_at")
    values = {name: row[name] for name in names}
    for proven, leaf in zip(proof.leaves, (first, second), strict=True):
        assert leaf.parts["row"] == commitment(proven.salt or b"", "row", values)
        assert leaf.parts["row"] != commitment(proven.salt or b"", "row", values | {"tenant": "other"})
        assert leaf.parts["private"] == commitment(SALT, "private", [{"name": USER_TAG, "value": "ann"}])
        assert b"ann" not in proven.entry
        assert b"tenant" not in proven.entry


async def test_events_that_are_committed_after_the_row_was_read_are_sealed_with_their_own_row(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Postgres each statement of a pass sees what was committed before it."""
    read_run_rows = log_sources.run_rows

    def earlier(*arguments: Any) -> Any:
        return {run: {**row, "seq": 1} for run, row in read_run_rows(*arguments).items()}

    await store.append(admission_entry("run"))
    await store.append(note("run"))
    with monkeypatch.context() as patch:
        patch.setattr(log_sources, "run_rows", earlier)
        await seal(store)
    await store.append(note("run"))
    await seal(store)
    assert [parse_leaf(leaf.entry).events for leaf in (await store.log.proof("run")).leaves] == [1, 3]


async def test_a_ledger_that_was_completed_later_is_sealed_again(store: SqlStore) -> None:
    await store.append(admission_entry("run"))
    await seal(store)
    values: dict[str, Any] = {column.name: "" for column in DISCLOSURES.columns if not column.nullable}
    numbers = {"at": 1.5, "attempt": 1, "bytes": 9, "saw_user": True, "saw_results": False}
    row = values | numbers | {"run": "run", "call": "call_1"}

    def complete(conn: Connection) -> None:
        conn.execute(insert(DISCLOSURES).values(row))
        transparency_log.queue_runs(conn, ["run", "run"])

    await store._write(complete)
    await seal(store)
    await store._write(lambda conn: transparency_log.queue_runs(conn, ["run"]))
    assert await seal(store) == 0
    first, second = (await store.log.proof("run")).leaves
    assert "disclosures" not in parse_leaf(first.entry).parts
    assert parse_leaf(second.entry).parts["disclosures"] == commitment(second.salt or b"", "disclosures", [row])
    assert parse_leaf(second.entry).root == parse_leaf(first.entry).root


async def test_nothing_is_sealed_twice(store: SqlStore) -> None:
    await store.append(admission_entry("run"))
    assert await seal(store) == 2, "the run, and the key of the log"
    before = await store.log.state()
    assert await seal(store) == 0
    assert await store.log.state() == before
    assert (before.waiting, before.lag, before.catching_up, before.stored_key) == (0, 0.0, False, False)


@pytest.mark.long
async def test_tiles_have_all_entries_and_the_root_is_theirs(store: SqlStore) -> None:
    for start in range(0, 520, 40):
        await asyncio.gather(
            *[store.append(admission_entry(f"run{number:03d}")) for number in range(start, start + 40)]
        )
        await seal(store)
    head = await checkpoint(store)
    hashes: list[bytes] = []
    for number in range(3):
        hashes += hashes_of(await store.log.tile(0, number))
    entries = [entry for number in range(3) for entry in await store.log.entries(number)]
    assert (len(entries), hashes) == (head.size, [leaf_hash(entry) for entry in entries])
    assert head.root == tree_root(hashes)
    assert hashes_of(await store.log.tile(1, 0)) == [tree_root(hashes[:256]), tree_root(hashes[256:512])]
    assert sorted(await sealed_runs(store)) == [f"run{number:03d}" for number in range(520)]


async def test_a_key_is_sealed_with_each_of_its_changes(store: SqlStore) -> None:
    await store.add_key(KEY)
    await seal(store)
    await store.revoke_key("key1", 5.0)
    await store.revoke_key("key1", 6.0)
    await seal(store)
    kinds = [(leaf.kind, leaf.id) for leaf in await leaves(store) if leaf.kind != "log_key"]
    assert kinds == [("key", "key1"), ("admin_event", "1"), ("key", "key1"), ("admin_event", "2")]


async def test_a_comment_is_sealed_apart_from_its_rating(store: SqlStore) -> None:
    await store.append(admission_entry("run"))
    rating = Feedback("f1", "run", "tenant", "key", 2.0, "explicit", "api", "", 1.0, "", "It was fine.")
    await store.rate(rating)
    await seal(store)
    (row,) = await fetch_rows(store, select(FEEDBACK))
    (entry,) = await fetch_rows(store, select(LOG_LEAVES).where(LOG_LEAVES.c.kind == "feedback"))
    leaf = parse_leaf(entry["entry"])
    assert leaf.parts["private"] == commitment(SALT, "private", {"comment": "It was fine."})
    del row["comment"]
    assert leaf.parts["row"] == commitment(entry["salt"], "row", row)
    assert [parse_leaf(leaf.entry).kind for leaf in (await store.log.proof("run")).leaves] == ["run", "feedback"]


async def test_a_pruned_run_leaves_its_proofs_and_no_salt(store: SqlStore) -> None:
    await store.append(admission_entry("run"))
    await seal(store)
    before = await store.log.proof("run")

    def ended(conn: Connection) -> int:
        conn.execute(text("UPDATE runs SET ended_at = 3"))
        revision: int = conn.execute(select(RUNS.c.revision)).scalar_one()
        return revision

    revision = await store._write(ended)
    left = PrunedRun("run", "tenant", "succeeded", 1.0, 3.0, 9.0, 1, parse_leaf(before.leaves[0].entry).root, "")
    assert await store.prune([(left, revision)]) == ["run"]
    await seal(store)
    after = await store.log.proof("run")
    head = await checkpoint(store)
    assert [parse_leaf(leaf.entry).kind for leaf in after.leaves] == ["run", "pruned"]
    assert all(includes(leaf.place, head.size, leaf_hash(leaf.entry), leaf.proof, head.root) for leaf in after.leaves)
    assert (after.leaves[0].entry, after.leaves[0].salt) == (before.leaves[0].entry, None)
    assert after.leaves[1].salt is not None


async def test_runs_from_before_the_log_are_sealed(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IN_LOOP", "BETWEEN_AWAITS"):
        monkeypatch.setattr(log_writer, name, log_writer.PassLimits(changes=3, events=9))
    for number in range(8):
        await store.append(admission_entry(f"run{number}"))
    await store._write(lambda conn: conn.execute(text("DELETE FROM log_queue")))
    await seal(store)
    assert await sealed_runs(store) == {f"run{number}": [1] for number in range(8)}


async def test_one_of_several_processes_seals_at_a_time(opener: Opener) -> None:
    async with opener() as first_store, opener() as second_store:
        await asyncio.gather(*[first_store.append(admission_entry(f"run{number}")) for number in range(30)])
        await asyncio.gather(*[seal(store) for store in (first_store, second_store) * 4])
        await asyncio.gather(*[first_store.append(note(f"run{number}")) for number in range(30)])
        await asyncio.gather(*[seal(store) for store in (first_store, second_store) * 4])
        await seal(first_store)
        assert await sealed_runs(first_store) == {f"run{number}": [1, 2] for number in range(30)}


async def test_without_a_setting_a_key_is_made_and_kept(store: SqlStore) -> None:
    await store.log.seal([], new_salts)
    state = await store.log.state()
    assert state.stored_key
    assert await checkpoint(store, Verifier.parse(*state.verifiers))
    await store.append(admission_entry("run"))
    await store.log.seal([], new_salts)
    assert (await checkpoint(store, Verifier.parse(*state.verifiers))).size == 2
    await store.append(note("run"))
    await seal(store)
    assert (await checkpoint(store)).size == 4, "another key is named by an entry, and the tree goes on"
    assert not (await store.log.state()).stored_key


async def test_a_pass_says_in_place_of_which_keys_it_has_put_its_own(store: SqlStore) -> None:
    other = Signer("log.example/baton", bytes(range(1, 33)))
    replaced = []
    for signer in (SIGNER, SIGNER, other, SIGNER):
        sealed = await store.log.seal([signer], new_salts)
        assert sealed is not None
        replaced.append(sealed.replaced_keys)
    assert replaced == ["", "", str(SIGNER.verifier), str(other.verifier)]


@pytest.mark.integration
async def test_a_slow_transaction_is_not_passed_over(migrated_postgres_url: str) -> None:
    """It has begun before others that are sealed long before it commits."""
    async with open_store(migrated_postgres_url) as store, open_store(migrated_postgres_url) as slow:
        async with slow._runner._writing.connect() as conn:  # type: ignore[attr-defined]
            await conn.execute(text("INSERT INTO catalogs (digest, body) VALUES ('slow', '')"))
            for number in range(3):
                await store.append(admission_entry(f"run{number}"))
                await seal(store)
            assert sorted(await sealed_runs(store)) == ["run0", "run1", "run2"], "nobody waits for it"
            await conn.commit()
        await seal(store)
        assert [leaf.id for leaf in await leaves(store) if leaf.kind == "catalog"] == ["slow"]


@pytest.mark.integration
async def test_a_database_that_counts_transactions_anew_is_sealed_all_the_same(
    migrated_postgres_url: str,
) -> None:
    """A dump that is restored on another server has numbers of transactions that will come there in years."""
    async with open_store(migrated_postgres_url) as store:
        await store.append(admission_entry("before"))
        await store._write(lambda conn: conn.execute(text("UPDATE log_state SET xid = 1000000000000")))
        await store._write(lambda conn: conn.execute(text("UPDATE log_queue SET xid = 1000000000001")))
        await seal(store)
        await store.append(admission_entry("after"))
        await seal(store)
        assert await sealed_runs(store) == {"before": [1], "after": [1]}
