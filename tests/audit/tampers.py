"""Random tampers with a sealed database, each of which `baton audit verify` must find.

`python -m tests.audit.tampers --count 2000` makes a database with runs of every kind, seals it, keeps its checkpoints,
and then alters it again and again as somebody could who may write to it and knows all about Baton: triggers are dropped
first, and nothing is left in the queue of the log. `--postgres` does the same on Postgres. Each tamper is rolled back.
"""

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import Connection, Table, create_engine, delete, insert, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from app.audit.log.findings import Finding, Verification
from app.audit.log.rows import check_database
from app.audit.log.tree import Checkpoint, read_checkpoint
from app.audit.log.verify import LogCheck
from app.core.contents import content_ref
from app.core.pool.budgets import Budget
from app.core.rating.calibration import Trial
from app.core.rating.feedback import Feedback
from app.core.run.kinds import Kind
from app.core.transparency.notes import Signer
from app.store.protocol import METADATA_TAG, REQUEST_TAG, USER_TAG, Actor, Entry, Hold, KeyRow
from app.store.rows import log_sources, transparency_log
from app.store.sealed_rows import SealedRows
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.log_statements import LogStatements
from app.store.sqlkit.runner import parse_url
from app.store.sqlkit.sealing import Decrypt
from app.store.sqlkit.statements import Statements
from app.store.sqlkit.tables import METADATA
from app.store.writing import log_writer
from tests.conformance.test_store_retention import admission, end_run, find_rest_of
from tests.harness.raw_facts import Raw

SIGNER = Signer("log.example/baton", bytes(range(32)))
TABLES = METADATA.tables
OWNER = Actor("owner", "command")
UNSEALED: dict[str, set[str]] = {
    "runs": {"salt", "epoch", "driver", "lease_until", "claims", "notify_turn", "revision"},
    "log_state": {"id", "xid"},
}
"""Columns that are no record of anything: leases, locks, and what follows from events."""
FILLING: dict[type, Any] = {str: "x", bytes: b"x", int: 1, float: 5.0}
"""What a column gets that has nothing, by the type of its values."""
RECORDS = (
    "runs",
    "events",
    "disclosures",
    "tags",
    "feedback",
    "keys",
    "tenants",
    "budgets",
    "holds",
    "policies",
    "trials",
    "catalogs",
    "conductor_changes",
    "admin_events",
    "pruned_runs",
    "contents",
    "shared_contents",
    "texts",
    "log_leaves",
    "log_tiles",
    "log_state",
)
"""The tables of record, as deploy/docs/transparency.md lists them."""
KNOWING_SHARE = 0.3
"""The share of random tampers that are those of somebody who knows what to do."""
Tamper = Callable[[Connection, random.Random], str]


class Subject(Struct, frozen=True):
    """A sealed database, with the checkpoints that are held outside of it."""

    url: str
    checkpoints: tuple[tuple[str, Checkpoint], ...]
    yesterday: Path | None = None
    """A copy of the database from before its last runs, where there is one."""


async def seal(store: SqlStore) -> str:
    """Seal all that waits. Returns the signed checkpoint."""
    while (sealed := await store.log.seal([SIGNER], lambda: os.urandom(16))) is not None and sealed.more:
        pass
    note = (await store.log.state()).checkpoint
    assert note is not None
    return note


def play_run(run: str) -> tuple[Entry, Entry]:
    """The admission and the end of a run that names its text, and has the tags that its events give it."""
    first = admission(run)
    body = {"tier": "mini", "labels": ["phi"], "request_id": "req", "task": first.contents[0][0]}
    assert first.new is not None
    body |= {"deadline": first.new.deadline}
    body |= {"excluded": {"beta": "not cleared for phi"}, "decision": {"propensity": 0.5}}
    tags = ((USER_TAG, "ann"), (METADATA_TAG, "team=search"), (REQUEST_TAG, "req"), ("label", "phi"))
    admitted = replace(first, events=(Raw(Kind.ADMITTED, body),), tags=tags)
    return admitted, replace(end_run(run, 2.0), tags=(("worker", "alpha"),))


async def furnish(store: SqlStore) -> None:
    """Add what runs alone do not make: keys, ratings, tags of callers, a pruned run, and so on."""
    for name in ("kept", "pruned", "erased"):
        for entry in play_run(f"run_{name}"):
            await store.append(entry)
    key = KeyRow("key1", "acme", "ci", b"d" * 32, frozenset({"runs:read"}), 1.0, labels=frozenset({"phi"}))
    await store.add_key(key, by=OWNER)
    await store.add_key(replace(key, id="key2", name="other"), by=OWNER)
    await seal(store)
    await store.revoke_key("key2", 5.0, by=OWNER)
    await store.add_tenant("acme", 1.0, by=OWNER)
    await store.set_budget(Budget("acme", "key", "key1", "day", 5), by=OWNER)
    await store.place_hold(Hold("hold_1", "tenant", "acme", "", "case 12", 3.0, ""), by=OWNER)
    for number, name in enumerate(("kept", "kept", "erased")):
        rating = Feedback(
            f"fb{number}", f"run_{name}", "tenant", "key", 5.0, "explicit", "user", "", 0.5, "good", "why"
        )
        await store.rate(rating)
    trial = Trial("alpha", "m", "v1", "task", "math", "sums", 1, "2+2", "run_kept", 4.0, 1.0, 10, 0.5)
    await store.note_trial(trial)
    await store._write(lambda conn: conn.execute(insert(TABLES["policies"]).values(POLICY)))
    await store.keep_catalog("0" * 64, lambda: b'{"workers": []}')
    await seal(store)
    await store.erase("run_erased")
    await store.prune([_pruned_of(await find_rest_of(store, "run_pruned"), await _root(store, "run_pruned"))])


POLICY = {"policy": "learns", "number": 3, "at": 9.0, "body": b'{"alpha": 1.5}'}


async def _root(store: SqlStore, run: str) -> bytes:
    from app.core.run.journal_hash import root

    query = select(*[TABLES["events"].c[name] for name in ("seq", "kind", "at", "body")])
    query = query.where(TABLES["events"].c.run == run).order_by(TABLES["events"].c.seq)
    return root(run, [tuple(row) for row in await store._read(lambda conn: conn.execute(query).all())])


def _pruned_of(left: Any, root: bytes) -> Any:
    return replace(left[0], root=root), left[1]


def verify(
    conn: Connection,
    checkpoints: Sequence[tuple[str, Checkpoint]],
    decrypt: Decrypt | None = None,
    *,
    settled: bool = True,
) -> Verification:
    """Verify a database, as the command does. `decrypt` decrypts contents; nothing writes to it if it is `settled`."""
    report = Verification()
    stored = SealedRows(conn, decrypt or (lambda _place, body: body))
    check_database(LogCheck(report, held_checkpoints=tuple(checkpoints)), stored, settled=settled)
    return report


# -- random tampers


def _rows(conn: Connection, table: Table) -> list[Any]:
    return list(conn.execute(select(table).order_by(*table.primary_key.columns)).mappings())


def _where(table: Table, row: Any) -> list[Any]:
    return [column == row[column.name] for column in table.primary_key.columns]


def _other(value: Any, rnd: random.Random) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rnd.choice((-1, 1, 1000))
    if isinstance(value, float):
        return value + rnd.choice((-0.5, 0.001, 86_400.0))
    if isinstance(value, bytes):
        at = rnd.randrange(len(value)) if value else 0
        return value[:at] + bytes([(value[at] + 1) % 256 if value else 1]) + value[at + 1 :]
    return f"{value}x" if value is not None else None


def list_recorded_columns(name: str) -> list[str]:
    """The columns of a table of record that are records."""
    return [str(column.name) for column in TABLES[name].columns if str(column.name) not in UNSEALED.get(name, ())]


def edit(name: str, only: str = "") -> Tamper:
    """Change one value of one row, of this column if one is named."""

    def tamper(conn: Connection, rnd: random.Random) -> str:
        table = TABLES[name]
        rows = [row for row in _rows(conn, table) if not only or row[only] is not None]
        row = rnd.choice(rows)
        column = only or rnd.choice([column for column in list_recorded_columns(name) if row[column] is not None])
        values = {column: _other(row[column], rnd)}
        conn.execute(update(table).where(*_where(table, row)).values(values))
        return f"edit {name}.{column}"

    return tamper


def fill(name: str, column: str) -> Tamper:
    """Give one row a value where it has none."""

    def tamper(conn: Connection, rnd: random.Random) -> str:
        table = TABLES[name]
        row = rnd.choice([row for row in _rows(conn, table) if row[column] is None])
        values = {column: FILLING[table.c[column].type.python_type]}
        conn.execute(update(table).where(*_where(table, row)).values(values))
        return f"fill {name}.{column}"

    return tamper


def remove(name: str) -> Tamper:
    """Delete one row."""

    def tamper(conn: Connection, rnd: random.Random) -> str:
        table = TABLES[name]
        conn.execute(delete(table).where(*_where(table, rnd.choice(_rows(conn, table)))))
        return f"delete from {name}"

    return tamper


def add(name: str) -> Tamper:
    """Insert a copy of a row under another primary key."""

    def tamper(conn: Connection, rnd: random.Random) -> str:
        table = TABLES[name]
        row = dict(rnd.choice(_rows(conn, table)))
        column = str(list(table.primary_key.columns)[-1].name)
        if name == "tags":
            column = "value"
        row[column] = row[column] + 10_000 if isinstance(row[column], int) else f"{row[column]}y"
        conn.execute(insert(table).values(row))
        return f"insert into {name}"

    return tamper


# -- tampers of somebody who knows what to do


def whole_run(conn: Connection, rnd: random.Random) -> str:
    """Remove a run from every table, and everything that the log has of it as far as that can be done."""
    run = rnd.choice(_rows(conn, TABLES["runs"]))["id"]
    for name, table in TABLES.items():
        if "run" in table.c and name not in ("trials", "once"):
            conn.execute(delete(table).where(table.c.run == run))
    conn.execute(delete(TABLES["runs"]).where(TABLES["runs"].c.id == run))
    return "a whole run removed"


def owner_of_a_run(conn: Connection, rnd: random.Random) -> str:
    """Give a run to another tenant, or to another key."""
    runs, column = TABLES["runs"], rnd.choice(("tenant", "key"))
    run = rnd.choice(_rows(conn, runs))["id"]
    conn.execute(update(runs).where(runs.c.id == run).values({column: "somebody"}))
    return f"the {column} of a run rewritten"


def origin_of_a_run(conn: Connection, rnd: random.Random) -> str:
    """Say that a run of a caller's follows from another run."""
    runs, (column, value) = TABLES["runs"], rnd.choice((("origin_kind", "shadow"), ("origin_run", "run_other")))
    run = rnd.choice(_rows(conn, runs))["id"]
    conn.execute(update(runs).where(runs.c.id == run).values({column: value}))
    return f"the {column} of a run rewritten"


def tags_of_a_run(conn: Connection, rnd: random.Random) -> str:
    """Delete all tags of a run."""
    tags = TABLES["tags"]
    run = rnd.choice(_rows(conn, tags))["run"]
    conn.execute(delete(tags).where(tags.c.run == run))
    return "the tags of a run deleted"


def _rewrite(conn: Connection, rnd: random.Random, change: Callable[[dict[str, Any]], bool]) -> bool:
    """Change the body of one event that `change` alters."""
    events = TABLES["events"]
    rows = _rows(conn, events)
    rnd.shuffle(rows)
    for row in rows:
        body = orjson.loads(row["body"])
        if change(body):
            conn.execute(update(events).where(*_where(events, row)).values(body=orjson.dumps(body)))
            return True
    return False


def exclusions(conn: Connection, rnd: random.Random) -> str:
    """Rewrite why a worker was left out."""

    def change(body: dict[str, Any]) -> bool:
        if not body.get("excluded"):
            return False
        body["excluded"] = {name: "not in the pool" for name in body["excluded"]}
        return True

    assert _rewrite(conn, rnd, change)
    return "exclusion reasons rewritten"


def labels(conn: Connection, rnd: random.Random) -> str:
    """Take the labels from a run, and its tags with them."""

    def change(body: dict[str, Any]) -> bool:
        had = bool(body.get("labels"))
        body["labels"] = []
        return had

    assert _rewrite(conn, rnd, change)
    conn.execute(delete(TABLES["tags"]).where(TABLES["tags"].c.name == "label"))
    return "labels rewritten"


def propensities(conn: Connection, rnd: random.Random) -> str:
    """Change the probability with which a selector has chosen."""

    def change(body: dict[str, Any]) -> bool:
        decision = body.get("decision")
        if not isinstance(decision, dict) or "propensity" not in decision:
            return False
        decision["propensity"] = 0.123
        return True

    if not _rewrite(conn, rnd, change):
        raise LookupError("no decision")
    return "a propensity changed"


def renamed_worker(conn: Connection, rnd: random.Random) -> str:
    """Rename a worker through the whole history, and make the hashes of all texts anew with the salts of their runs."""
    events, runs, contents = TABLES["events"], TABLES["runs"], TABLES["contents"]
    old, new = b"alpha", b"gamma"
    salts = {row["id"]: row["salt"] for row in _rows(conn, runs)}
    refs: dict[bytes, bytes] = {}
    for row in _rows(conn, contents):
        salt = salts.get(row["run"])
        if salt is not None and old in row["body"]:
            body = row["body"].replace(old, new)
            ref = content_ref(salt, body)
            refs[row["ref"].encode()] = ref.encode()
            conn.execute(update(contents).where(*_where(contents, row)).values(ref=ref, body=body))
    for row in _rows(conn, events):
        body = row["body"].replace(old, new)
        for before, after in refs.items():
            body = body.replace(before, after)
        conn.execute(update(events).where(*_where(events, row)).values(body=body))
    conn.execute(update(TABLES["tags"]).where(TABLES["tags"].c.value == "alpha").values(value="gamma2"))
    return "a worker renamed through the whole history"


def exchanged_events(conn: Connection, rnd: random.Random) -> str:
    """Exchange the places of two events of a run."""
    events = TABLES["events"]
    rows = _rows(conn, events)
    at = rnd.choice([at for at in range(len(rows) - 1) if rows[at]["run"] == rows[at + 1]["run"]])
    first, second = rows[at], rows[at + 1]
    for row, seq in ((first, 9_999), (second, first["seq"])):
        conn.execute(update(events).where(*_where(events, row)).values(seq=seq))
    moved = (events.c.run == first["run"], events.c.seq == 9_999)
    conn.execute(update(events).where(*moved).values(seq=second["seq"]))
    return "two events exchanged"


def cut_log(conn: Connection, rnd: random.Random) -> str:
    """Cut the end off the log and what it has sealed, and set its state back to an earlier checkpoint."""
    leaves = TABLES["log_leaves"]
    size = len(_rows(conn, leaves))
    keep = rnd.randrange(size // 2, size - 1)
    conn.execute(delete(leaves).where(leaves.c.place >= keep))
    conn.execute(update(TABLES["log_state"]).values(size=keep))
    return "the log cut off"


def new_log(conn: Connection, rnd: random.Random) -> str:
    """Alter a run, throw the log away and seal everything anew with the right key."""
    owner_of_a_run(conn, rnd)
    for name in ("log_leaves", "log_tiles", "log_queue"):
        conn.execute(delete(TABLES[name]))
    conn.execute(update(TABLES["log_state"]).values(size=0, checkpoint=None, verifiers=None, catch_up=""))
    for kind, name, column in QUEUED:
        conn.execute(
            text(f"INSERT INTO log_queue (kind, id, xid, at) SELECT '{kind}', CAST({column} AS text), 0, 1 FROM {name}")
        )
    seal_again(conn)
    return "the log made anew with the right key"


def seal_again(conn: Connection) -> None:
    """Seal what waits, as the service would."""
    statements = LogStatements(Statements(conn.dialect), conn.dialect, log_sources.OF_RUN)
    stored = log_writer.StoredSigner()
    more = True
    while more:
        sealed = log_writer.seal(conn, statements, stored, [SIGNER], lambda: os.urandom(16))
        more = sealed is not None and sealed.more


def sealed_again(conn: Connection, rnd: random.Random) -> str:
    """Alter what concerns a run that has ended, and have the service itself seal it once more as it is then."""
    runs = TABLES["runs"]
    run = rnd.choice([row for row in _rows(conn, runs) if row["salt"] is not None])["id"]
    kind = rnd.choice(("run", "private", "erasure"))
    if kind == "run":
        conn.execute(update(runs).where(runs.c.id == run).values(spent_usd=runs.c.spent_usd + 1))
    elif kind == "private":
        conn.execute(insert(TABLES["tags"]).values(name=USER_TAG, value="eve", run=run))
    else:
        conn.execute(update(runs).where(runs.c.id == run).values(erased_at=5.0, erased_by="user"))
    transparency_log.queue_runs(conn, [run])
    transparency_log.queue_runs(conn, [run], "erasure")
    seal_again(conn)
    return f"altered and sealed again: {kind}"


QUEUED = (
    ("pruned", "pruned_runs", "id"),
    ("feedback", "feedback", "id"),
    ("key", "keys", "id"),
    ("tenant", "tenants", "name"),
    ("budget", "budgets", "id"),
    ("policy", "policies", "policy"),
    ("catalog", "catalogs", "digest"),
    ("conductor_change", "conductor_changes", "id"),
    ("admin_event", "admin_events", "seq"),
)


def entry_and_tiles(conn: Connection, rnd: random.Random) -> str:
    """Alter an entry and the hashes of all tiles above it."""
    leaves, tiles = TABLES["log_leaves"], TABLES["log_tiles"]
    row = rnd.choice(_rows(conn, leaves))
    fields = orjson.loads(row["entry"])
    fields["at"] = fields["at"] - 86_400
    entry = orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
    conn.execute(update(leaves).where(*_where(leaves, row)).values(entry=entry))
    from app.core.transparency.merkle import leaf_hash

    tile = conn.execute(select(tiles).where(tiles.c.level == 0, tiles.c.number == row["place"] // 256)).mappings().one()
    at = row["place"] % 256 * 32
    body = tile["body"][:at] + leaf_hash(entry) + tile["body"][at + 32 :]
    conn.execute(update(tiles).where(*_where(tiles, tile)).values(body=body))
    return "an entry altered together with its tile"


def hand_made_erasure(conn: Connection, rnd: random.Random) -> str:
    """Delete salt and content of a run as an erasure does, with or without a date."""
    runs = TABLES["runs"]
    run = rnd.choice([row for row in _rows(conn, runs) if row["salt"] is not None])["id"]
    values: dict[str, Any] = {"salt": None}
    if rnd.random() < 0.5:
        values |= {"erased_at": 5.0, "erased_by": "retention"}
    conn.execute(update(runs).where(runs.c.id == run).values(values))
    conn.execute(delete(TABLES["contents"]).where(TABLES["contents"].c.run == run))
    conn.execute(update(TABLES["feedback"]).where(TABLES["feedback"].c.run == run).values(comment=""))
    private = TABLES["tags"].c.name.in_((USER_TAG, METADATA_TAG))
    conn.execute(delete(TABLES["tags"]).where(TABLES["tags"].c.run == run, private))
    return "content deleted as an erasure does"


def salts(conn: Connection, rnd: random.Random) -> str:
    """Delete the salt of an entry, without which nothing can be compared with it."""
    leaves = TABLES["log_leaves"]
    rows = [row for row in _rows(conn, leaves) if row["salt"] is not None]
    conn.execute(update(leaves).where(*_where(leaves, rnd.choice(rows))).values(salt=None))
    return "the salt of an entry deleted"


def feedback_given(conn: Connection, rnd: random.Random) -> str:
    """Change what a run's answer was worth."""
    feedback = TABLES["feedback"]
    row = rnd.choice(_rows(conn, feedback))
    conn.execute(update(feedback).where(*_where(feedback, row)).values(score=(row["score"] or 0.0) / 2 + 0.1))
    return "a rating changed"


def learned_policy(conn: Connection, rnd: random.Random) -> str:
    """Change what a selector has learned."""
    conn.execute(update(TABLES["policies"]).values(body=b'{"alpha": 9.5}'))
    return "a learned policy altered"


def key_row(conn: Connection, rnd: random.Random) -> str:
    """Delete a key."""
    keys = TABLES["keys"]
    conn.execute(delete(keys).where(keys.c.id == rnd.choice(_rows(conn, keys))["id"]))
    return "a key's row deleted"


KNOWING: tuple[Tamper, ...] = (
    whole_run,
    owner_of_a_run,
    origin_of_a_run,
    tags_of_a_run,
    key_row,
    exclusions,
    labels,
    propensities,
    renamed_worker,
    feedback_given,
    learned_policy,
    exchanged_events,
    cut_log,
    new_log,
    entry_and_tiles,
    salts,
    hand_made_erasure,
    sealed_again,
)
"""Every one that issue H lists as not found before, and others."""
EACH_COLUMN: tuple[Tamper, ...] = tuple(
    [way(name, column) for name in RECORDS for column in list_recorded_columns(name) for way in (edit, fill)]
)
RANDOM: tuple[Tamper, ...] = tuple([way(name) for name in RECORDS for way in (edit, remove, add)])


def drop_triggers(conn: Connection) -> None:
    """Remove the triggers that refuse changes, or that queue them for the log."""
    if conn.dialect.name == "sqlite":
        triggers = conn.execute(text("SELECT name FROM sqlite_master WHERE type = 'trigger'")).scalars().all()
        for name in triggers:
            conn.execute(text(f"DROP TRIGGER {name}"))
        return
    conn.execute(text("SET LOCAL session_replication_role = replica"))


def attempt(
    conn: Connection, subject: Subject, tamper: Tamper, rnd: random.Random
) -> tuple[str, Finding | None] | None:
    """Carry out one tamper in a transaction that is rolled back, and verify. None if it could not be carried out."""
    with conn.begin() as transaction:
        drop_triggers(conn)
        try:
            words = tamper(conn, rnd)
        except (DBAPIError, LookupError):
            transaction.rollback()
            return None
        report = verify(conn, subject.checkpoints)
        transaction.rollback()
    return words, report.first


async def prepare(folder: Path, url: str = "") -> Subject:
    """Make a sealed database out of the database in a folder, or of an empty one."""
    path = folder / "baton.db"
    url = url or f"sqlite:///{path}"
    notes = []
    async with open_store(url) as store:
        await furnish(store)
        notes.append(await seal(store))
        yesterday = folder / "yesterday.db"
        if path.exists():
            await store._read(lambda conn: conn.execute(text(f"VACUUM INTO '{yesterday}'")))
        for entry in play_run("run_later"):
            await store.append(entry)
        notes.append(await seal(store))
    checkpoints = tuple([(f"held-{number}", read_checkpoint(note)) for number, note in enumerate(notes)])
    return Subject(url, checkpoints, yesterday if path.exists() else None)


def main() -> int:
    """Carry out tampers, and print what was not found. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--postgres", metavar="URL", default="", help="an empty, migrated database")
    options = parser.parse_args()
    from tests.audit.scenes import play

    rnd = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not options.postgres:
            asyncio.run(play(folder))
        subject = asyncio.run(prepare(folder, options.postgres))
        return _report(subject, rnd, options.count)


def _report(subject: Subject, rnd: random.Random, count: int) -> int:
    """Carry out tampers and print the figures."""
    began = time.monotonic()
    caught, missed = asyncio.run(tamper_often(subject, rnd, count))
    for words, number in sorted(caught.items()):
        print(f"{number:>5}  {words}")
    for words, number in sorted(missed.items()):
        print(f"{number:>5}  NOT FOUND: {words}")
    print(f"{caught.total():,} of {caught.total() + missed.total():,} found in {time.monotonic() - began:.0f} s")
    return 1 if missed else 0


async def tamper_often(subject: Subject, rnd: random.Random, count: int) -> tuple[Counter[str], Counter[str]]:
    """Carry out tampers on a database of either kind. Returns those that were found, and those that were not."""
    if subject.url.startswith("sqlite"):
        engine = create_engine(subject.url)
        with engine.connect() as conn:
            outcome = attempts(conn, subject, rnd, count)
        engine.dispose()
        return outcome
    remote = create_async_engine(parse_url(subject.url))
    async with remote.connect() as opened:
        outcome = await opened.run_sync(lambda conn: attempts(conn, subject, rnd, count))
    await remote.dispose()
    return outcome


def attempts(conn: Connection, subject: Subject, rnd: random.Random, count: int) -> tuple[Counter[str], Counter[str]]:
    """Carry out so many tampers, one after the other: each column is edited once if there are enough of them, and then
    they are random. The untouched database must be clean."""
    caught: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    report = verify(conn, subject.checkpoints)
    conn.rollback()
    assert report.is_clean, list(report.in_order())
    first = list(EACH_COLUMN) if count > len(EACH_COLUMN) else []
    while caught.total() + missed.total() < count:
        tamper = first.pop() if first else rnd.choice(KNOWING if rnd.random() < KNOWING_SHARE else RANDOM)
        outcome = attempt(conn, subject, tamper, rnd)
        if outcome is not None:
            words, finding = outcome
            (caught if finding is not None else missed)[words] += 1
    return caught, missed


if __name__ == "__main__":
    raise SystemExit(main())
