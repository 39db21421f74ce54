"""`baton audit verify`: a database that is as it was sealed is clean, and whatever is altered in it is named."""

import asyncio
import json
import random
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, create_engine, insert, text

from app.audit.budgets import check_windows
from app.audit.contents import OTHER_REFS
from app.audit.log import verify as log_verify
from app.audit.log.findings import Finding, Verification
from app.audit.log.folder import TilesFolder
from app.audit.log.tree import Checkpoint, GrowingTree, leaf_hash, root_of
from app.audit.log.verify import LogCheck, StoredEntry, tiles_of
from app.core.pool.budgets import Budget
from app.core.run.kinds import Kind
from app.core.run.visibility import complete_disclosures
from app.core.transparency import tiles
from app.core.transparency.merkle import tree_root
from app.core.transparency.notes import Signer
from app.store.archive import Administration, open_archive
from app.store.protocol import Entry
from app.store.rows import disclosures, log_sources, transparency_log
from app.store.sql import open_store
from app.store.sqlkit.log_statements import LogStatements
from app.store.sqlkit.statements import Statements
from app.store.sqlkit.tables import METADATA
from app.store.writing import log_writer
from tests.audit import scenes, tampers
from tests.audit.tampers import KNOWING, RANDOM, RECORDS, SIGNER, Subject, Tamper, attempt, verify
from tests.conformance.conversations import turn
from tests.conformance.entries import queue_entry, take
from tests.conformance.test_store_retention import find_rest_of
from tests.harness.in_process import pool_text, running_service
from tests.harness.raw_facts import Raw
from tests.stubs import ProviderStub

PAGE = Path(__file__).parents[2] / "deploy" / "docs" / "transparency.md"
SEEDED = 12
"""Random tampers of each test run; `python -m tests.audit.tampers` makes thousands."""


@pytest.fixture(scope="module")
def conn(subject: Subject) -> Iterator[Connection]:
    engine = create_engine(subject.url)
    with engine.connect() as opened:
        yield opened
    engine.dispose()


def test_what_was_sealed_is_clean_and_counted(subject: Subject, conn: Connection) -> None:
    report = verify(conn, subject.checkpoints)
    conn.rollback()
    assert list(report.in_order()) == []
    assert (report.runs, report.pruned, report.erased, report.pending) == (3, 1, 1, 0)
    assert report.rows > 15
    assert report.contents == 2


async def test_erasing_all_content_changes_no_proof(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "erased.db"
    shutil.copy(subject.url.removeprefix("sqlite:///"), path)
    reports = []
    engine = create_engine(f"sqlite:///{path}")
    async with open_store(f"sqlite:///{path}") as store:
        before = await store.log.proof("run_kept")
        assert await store.erase_contents(["run_kept", "run_later"], "retention") == 2
        assert await store.log.proof("run_kept") == before
        for _ in range(2):
            with engine.connect() as conn:
                reports.append(verify(conn, subject.checkpoints, settled=False))
            await tampers.seal(store)
        after = await store.log.proof("run_kept")
    with engine.connect() as conn:
        reports.append(verify(conn, subject.checkpoints))
    engine.dispose()
    assert [list(report.in_order()) for report in reports] == [[], [], []]
    assert [(report.erased, report.contents, report.pending) for report in reports] == [(3, 0, 2), (3, 0, 0), (3, 0, 0)]
    assert [(leaf.place, leaf.entry, leaf.salt) for leaf in after.leaves] == [
        (leaf.place, leaf.entry, leaf.salt) for leaf in before.leaves
    ]


async def test_encrypted_texts_are_verified_and_those_of_destroyed_keys_are_erased(tmp_path: Path) -> None:
    url, master = f"sqlite:///{tmp_path / 'baton.db'}", bytes(32)
    places = []
    async with open_store(url, content_keys=[master]) as store:
        for entry in tampers.play_run("run_one"):
            await store.append(entry)
        await tampers.seal(store)
        for _ in range(2):
            async with open_archive(url, [master]) as archive:
                places.append(await archive.snapshot(lambda conn, opened: verify(conn, (), opened)))
            await store._write(lambda conn: conn.execute(text("DELETE FROM content_keys")))
    assert (list(places[0].in_order()), places[0].contents) == ([], 1)
    assert [finding.rule for finding in places[1].in_order()] == ["content"]


REASONS = (("plan.step", "why"), ("plan.step", "why_withheld"), ("plan.accepted", "why"))


OF_ONE_KIND = [(kind, name) for kind, names in OTHER_REFS.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), [*OF_ONE_KIND, *REASONS])
def test_a_missing_text_is_found_by_every_field_that_names_one(
    conn: Connection, subject: Subject, kind: str, name: str
) -> None:
    change = text("UPDATE events SET kind = :kind, body = :body WHERE run = 'run_kept' AND seq = 2")
    event = {"kind": kind, "body": f'{{"{name}": "{"f" * 64}"}}'.encode()}
    with conn.begin() as transaction:
        tampers.drop_triggers(conn)
        conn.execute(change, event)
        report = verify(conn, subject.checkpoints)
        transaction.rollback()
    assert "the text ffffffffffff is not stored" in " ".join([finding.words for finding in report.findings])


CHANGES = (
    ("UPDATE policies SET number = number + 1, at = unixepoch()", "policy", "learns"),
    ("UPDATE holds SET reason = 'another'", "hold", "hold_1"),
    ("UPDATE trials SET score = 0.5, at = unixepoch()", "trial", "alpha\nm\nv1\ntask"),
    ("INSERT INTO catalogs (digest, body) VALUES ('new', x'7b7d')", "catalog", "new"),
)


@pytest.mark.parametrize(("change", "kind", "name"), CHANGES)
def test_what_waits_to_be_sealed_again_is_pending_beside_a_live_service(
    conn: Connection, subject: Subject, change: str, kind: str, name: str
) -> None:
    """The triggers that queue changes may be gone here."""
    thing = f"{kind} {name}".replace("\n", " ")
    with conn.begin() as transaction:
        conn.execute(text(change))
        conn.execute(text("DELETE FROM log_queue"))
        unnoted = verify(conn, subject.checkpoints, settled=False)
        queued = {"kind": kind, "name": name, "at": time.time()}
        conn.execute(text("INSERT INTO log_queue (kind, id, xid, at) VALUES (:kind, :name, 0, :at)"), queued)
        live = verify(conn, subject.checkpoints, settled=False)
        transaction.rollback()
    assert [finding for finding in unnoted.findings if finding.thing == thing] != []
    beside = [
        finding for finding in live.findings if finding.thing == thing and "without an entry" not in finding.words
    ]
    assert (beside, live.pending) == ([], 1), "the hold alone is compared with the log of changes, too"


OF_NOBODY = (
    ("UPDATE policies SET body = x'7b7d', at = unixepoch()", "policy learns"),
    ("UPDATE policies SET number = number + 1", "policy learns"),
    ("DELETE FROM policies", "policy learns"),
    ("UPDATE trials SET score = 0.5", "trial alpha m v1 task"),
    ("DELETE FROM trials", "trial alpha m v1 task"),
)
"""Changes that the service does not make: without a higher number, without the time of the change, or a deletion."""


@pytest.mark.parametrize(("change", "thing"), OF_NOBODY)
@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_change_that_the_service_never_makes_is_found_though_its_triggers_have_queued_it(
    conn: Connection, subject: Subject, change: str, thing: str, is_sealed: bool
) -> None:
    with conn.begin() as transaction:
        assert conn.execute(text(change)).rowcount == 1
        if is_sealed:
            tampers.seal_again(conn)
        report = verify(conn, subject.checkpoints, settled=False)
        transaction.rollback()
    assert {finding.thing for finding in report.findings} == {thing}, "its state, or its time as well"


def test_what_claims_to_be_of_the_future_is_not_taken_for_new(conn: Connection, subject: Subject) -> None:
    with conn.begin() as transaction:
        tampers.drop_triggers(conn)
        conn.execute(text("UPDATE policies SET number = number + 1"))
        conn.execute(text("INSERT INTO log_queue (kind, id, xid, at) VALUES ('policy', 'learns', 0, 4e9)"))
        conn.execute(text("UPDATE trials SET task = 'another', at = 4e9"))
        report = verify(conn, subject.checkpoints, settled=False)
        transaction.rollback()
    assert {"policy learns", "trial alpha m v1 another"} <= {finding.thing for finding in report.findings}


def test_a_run_that_is_said_to_be_pruned_just_now_must_be_named_with_its_own_events(
    conn: Connection, subject: Subject
) -> None:
    runs, pruned = tampers.TABLES["runs"], tampers.TABLES["pruned_runs"]
    with conn.begin() as transaction:
        tampers.drop_triggers(conn)
        forged = dict(conn.execute(pruned.select()).mappings().one()) | {"id": "run_kept", "pruned_at": time.time()}
        conn.execute(pruned.insert().values(forged))
        for name in ("events", "contents", "feedback", "tags", "disclosures"):
            table = tampers.TABLES[name]
            conn.execute(table.delete().where(table.c.run == "run_kept"))
        conn.execute(runs.delete().where(runs.c.id == "run_kept"))
        report = verify(conn, subject.checkpoints, settled=False)
        transaction.rollback()
    assert [finding.words for finding in report.findings] == ["it was pruned with other events than were sealed"]


def test_keys_of_the_log_that_come_back_are_noted(conn: Connection, subject: Subject) -> None:
    statements = LogStatements(Statements(conn.dialect), conn.dialect, log_sources.OF_RUN)
    other = Signer("log.example/baton", bytes(range(1, 33)))
    with conn.begin() as transaction:
        for signer in (other, SIGNER, other):
            log_writer.seal(conn, statements, log_writer.StoredSigner(), [signer], lambda: bytes(16))
        report = verify(conn, subject.checkpoints)
        transaction.rollback()
    assert report.is_clean
    assert [note.partition(".")[0] for note in report.notes] == [
        "2 entries name keys of the log again after others had replaced them"
    ]


def test_an_altered_hold_is_compared_with_its_entry(conn: Connection, subject: Subject) -> None:
    with conn.begin() as transaction:
        tampers.drop_triggers(conn)
        conn.execute(text("UPDATE holds SET reason = 'another'"))
        report = verify(conn, subject.checkpoints)
        transaction.rollback()
    findings = [(finding.thing, finding.words, finding.place is not None) for finding in report.findings]
    assert ("hold hold_1", "its row is not as it was sealed", True) in findings


def test_the_ledger_of_calls_that_were_made_in_another_order_than_they_are_named_is_as_it_was_sealed(
    conn: Connection, subject: Subject
) -> None:
    """Two processes name calls and note them in their own time."""
    row = {
        "run": "run_kept",
        "kind": "worker",
        "passed_over": None,
        "labels": None,
        "step": 0,
        "attempt": 1,
        "bytes": 1,
    }
    row |= dict.fromkeys(("saw_user", "saw_results"), True) | dict.fromkeys(("outcome", "saw_steps", "unseen"), "")
    row |= dict.fromkeys(("recipient", "provider", "model", "region", "tenant", "key", "planned_by"), "x")
    with conn.begin() as transaction:
        for call, at in (("call_a", 2.0), ("call_b", 1.0)):
            conn.execute(insert(tampers.TABLES["disclosures"]).values(**row, call=call, at=at))
        transparency_log.queue_runs(conn, ["run_kept"])
        statements = LogStatements(Statements(conn.dialect), conn.dialect, log_sources.OF_RUN)
        sealed = log_writer.seal(conn, statements, log_writer.StoredSigner(), [SIGNER], lambda: bytes(16))
        report = verify(conn, subject.checkpoints)
        transaction.rollback()
    assert sealed is not None
    assert sealed.leaves == 1
    assert [finding for finding in report.findings if "not as they were sealed" in finding.words] == []


async def open_run(folder: Path) -> str:
    """Make a sealed database with a run that goes on: it shares texts, spends of a budget, and has a claim. Returns
    the URL."""
    url, admission = f"sqlite:///{folder / 'open.db'}", turn("run_open", 2)
    assert admission.new is not None
    body = {"tier": "mini", "task": admission.contents[0][0], "budgets": ["account"]}
    async with open_store(url) as store:
        new = replace(admission.new, budgets=("account",))
        await store.append(replace(admission, events=(Raw(Kind.ADMITTED, body),), new=new))
        await store.append(queue_entry("run_open"))
        await store.append(take("run_open", 0, "engine"))
        await tampers.seal(store)
    return url


@pytest.fixture(scope="module")
def open_conn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    engine = create_engine(asyncio.run(open_run(tmp_path_factory.mktemp("open"))))
    with engine.connect() as opened:
        yield opened
    engine.dispose()


def find_after_change(
    conn: Connection, change: str, checkpoints: Sequence[tuple[str, Checkpoint]] = ()
) -> list[Finding]:
    """The findings after a change that is rolled back."""
    with conn.begin() as transaction:
        tampers.drop_triggers(conn)
        assert conn.execute(text(change)).rowcount == 1
        report = verify(conn, checkpoints)
        transaction.rollback()
    return list(report.in_order())


@pytest.mark.parametrize(
    ("code", "tags", "words"),
    [
        ("0.3.0", (("plan", "shown"),), []),
        ("0.3.0", (), ["its tag `plan` is not stored"]),
        ("0.2.0", (), []),
    ],
)
async def test_a_run_has_the_tags_that_its_events_give_it_and_since_0_3_that_of_a_preview(
    tmp_path: Path, code: str, tags: tuple[tuple[str, str], ...], words: list[str]
) -> None:
    first, last = tampers.play_run("run_shown")
    assert first.new is not None
    body = first.events[0].to_json() | {"preview": True, "recorded_labels": ["of-replay"]}
    other_tags = (*[tag for tag in first.tags if tag[0] != "plan"], ("label", "of-replay"))
    preview = replace(
        first, events=(Raw(Kind.ADMITTED, body),), tags=(*other_tags, *tags), new=replace(first.new, code=code)
    )
    results = Raw(Kind.STEP_RESULTS, {"labels": ["of-results"]})
    labelled = Entry("run_shown", 1.5, (results,), epoch=1, tags=(("label", "of-results"),))
    async with open_store(f"sqlite:///{tmp_path / 'shown.db'}") as store:
        for entry in (preview, labelled, last):
            await store.append(entry)
        await tampers.seal(store)
        report = await store._read(lambda conn: verify(conn, ()))
        await store.prune(
            [tampers._pruned_of(await find_rest_of(store, "run_shown"), await tampers._root(store, "run_shown"))]
        )
        left = await store._read(lambda conn: conn.execute(text("SELECT name FROM tags")).scalars().all())
    assert [finding.words for finding in report.findings] == words
    assert left == []


OF_SHARED_TEXTS = (
    ("UPDATE texts SET tenant = 'other' WHERE id = (SELECT head FROM shared_contents)", "texts have another tenant"),
    (
        "UPDATE texts SET before = 'nowhere' WHERE before IS NULL AND id IN (SELECT before FROM texts)",
        "name a text that is not stored",
    ),
    ("UPDATE shared_contents SET tail = 'nowhere'", "name a text that is not stored"),
    ("UPDATE log_leaves SET frontier = x'00' WHERE kind = 'log_key'", "columns beside the entry"),
    ("UPDATE log_leaves SET salt = x'00' WHERE kind = 'log_key'", "commits to no row"),
    ("UPDATE log_state SET checkpoint = rtrim(checkpoint, char(10))", "does not end with a line feed"),
)


@pytest.mark.parametrize(("change", "words"), OF_SHARED_TEXTS)
def test_what_no_commitment_covers_fits_what_is_stored_beside_it(
    open_conn: Connection, change: str, words: str
) -> None:
    assert words in " ".join([finding.words for finding in find_after_change(open_conn, change)])


@pytest.mark.parametrize("events", [-1, 2**62])
def test_an_entry_with_an_impossible_number_of_events_is_found(open_conn: Connection, events: int) -> None:
    change = f"""UPDATE log_leaves SET entry = CAST(json_set(CAST(entry AS TEXT), '$.events', {events}) AS BLOB)
        WHERE kind = 'run' AND place = (SELECT max(place) FROM log_leaves WHERE kind = 'run')"""
    assert {finding.rule for finding in find_after_change(open_conn, change)} >= {"entry"}


def test_an_open_run_is_clean_as_it_was_sealed(open_conn: Connection) -> None:
    report = verify(open_conn, ())
    open_conn.rollback()
    assert list(report.in_order()) == []
    assert report.contents == 1


OF_OPEN_RUNS = (
    "error = 'run_failed'",
    "budgets = NULL",
    "budgets = '[\"other\"]'",
    "thread = thread || '0'",
    "thread = NULL",
    "claims = 0",
)


@pytest.mark.parametrize("change", OF_OPEN_RUNS)
def test_a_column_of_an_open_run_that_no_entry_seals_fits_what_is_stored_beside_it(
    open_conn: Connection, change: str
) -> None:
    (finding,) = find_after_change(open_conn, f"UPDATE runs SET {change}")
    assert (finding.rule, finding.thing) == ("altered", "run run_open")
    assert change.split()[0].removesuffix("s") in finding.words


OF_ENDED_RUNS = (
    ("deadline = deadline + 1", "kept", "another `deadline` than its events"),
    ("held_usd = 5", "kept", "another `held_usd` than its calls"),
    ("held_tokens = 5", "kept", "another `held_tokens` than its calls"),
    ("erased_by = 'user'", "kept", "says that its content was erased"),
    ("erased_by = 'user'", "erased", "when and by what"),
    ("erased_at = erased_at - 86400", "erased", "when and by what"),
)


@pytest.mark.parametrize(("change", "run", "words"), OF_ENDED_RUNS)
def test_a_column_of_an_ended_run_follows_from_its_events_or_its_erasure(
    conn: Connection, subject: Subject, change: str, run: str, words: str
) -> None:
    (finding,) = find_after_change(conn, f"UPDATE runs SET {change} WHERE id = 'run_{run}'", subject.checkpoints)
    assert (finding.rule, finding.thing) == ("altered", f"run run_{run}")
    assert words in finding.words


def test_content_that_was_deleted_without_a_date_is_a_finding_where_erasures_are_dated(
    conn: Connection, subject: Subject
) -> None:
    change = "UPDATE runs SET erased_at = NULL, erased_by = NULL WHERE id = 'run_erased'"
    undated = [finding.words for finding in find_after_change(conn, change, subject.checkpoints)]
    assert "its content is gone, and its row does not say since when" in undated


async def waiting_run(folder: Path) -> str:
    """Make a sealed database with a real run that waits for the results of a tool. Returns the URL."""
    async with ProviderStub() as stub, running_service(folder, pool_text(stub)) as runtime:
        await scenes.waiting_for_results(stub, runtime)
        url = runtime.pool.configuration.settings.database_url
    async with open_store(url) as store:
        await tampers.seal(store)
    return url


@pytest.fixture(scope="module")
def waiting_conn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    engine = create_engine(asyncio.run(waiting_run(tmp_path_factory.mktemp("waiting"))))
    with engine.connect() as opened:
        yield opened
    engine.dispose()


def test_a_run_that_waits_is_clean_as_it_was_sealed(waiting_conn: Connection) -> None:
    report = verify(waiting_conn, ())
    waiting_conn.rollback()
    assert (list(report.in_order()), report.runs) == ([], 1)


def test_a_ledger_that_was_completed_after_its_run_was_sealed_is_as_the_events_say(waiting_conn: Connection) -> None:
    """Whoever alters its rows may have them sealed again, too."""
    conn = waiting_conn
    with conn.begin() as transaction:
        run = conn.execute(text("SELECT id FROM runs")).scalar_one()
        conn.execute(text("DELETE FROM disclosures"))
        transparency_log.queue_runs(conn, [run])
        tampers.seal_again(conn)
        rebuilt = disclosures.rebuild(conn, None, 100, complete_disclosures)
        tampers.seal_again(conn)
        completed_later = verify(conn, ())
        conn.execute(text("UPDATE disclosures SET region = 'the moon'"))
        transparency_log.queue_runs(conn, [run])
        tampers.seal_again(conn)
        altered = verify(conn, ())
        transaction.rollback()
    assert rebuilt.added > 0
    assert list(completed_later.in_order()) == []
    assert [finding.words.partition(" ")[0] for finding in altered.in_order()] == ["region"]


@pytest.mark.parametrize("column", ["state", "topology", "steps", "spent_usd", "spent_tokens", "held_usd", "deadline"])
def test_the_row_of_a_run_that_goes_on_follows_from_its_events(waiting_conn: Connection, column: str) -> None:
    other = "deadline + 1" if column == "deadline" else f"{column} || '1'"
    (finding,) = find_after_change(waiting_conn, f"UPDATE runs SET {column} = {other}")
    assert finding.rule == "altered"
    assert column in finding.words


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"spent": 5}, "5 is spent, the journal has 0"),
        ({"overrun": 5}, "5 is overrun, the journal has 0"),
        ({"held": 5}, "5 is held, its calls hold 0"),
        ({"budget": "other"}, "a window of it names another budget"),
        ({"start": 86_401}, "its window from 86401 to 172800 is none of its budget's"),
        ({"end": 172_799}, "its window from 86400 to 172799 is none of its budget's"),
        ({"start": 10**18}, f"its window from {10**18} to 172800 is none of its budget's"),
    ],
)
async def test_a_window_of_a_budget_is_one_of_its_own_with_what_the_calls_have_spent_and_hold(
    tmp_path: Path, changed: Mapping[str, Any], words: str | None
) -> None:
    name = "acme/tenant/-/day"
    row = {"account": name, "start": 86_400, "budget": name, "end": 172_800, "held": 0, "spent": 0, "overrun": 0}
    async with open_store(f"sqlite:///{tmp_path / 'spent.db'}") as store:
        await store.set_budget(Budget("acme", "tenant", "", "day", 5), by=tampers.OWNER)
        await tampers.seal(store)
        await store._write(lambda conn: conn.execute(insert(METADATA.tables["budget_windows"]).values(row | changed)))
        report = await store._read(lambda conn: verify(conn, ()))
    assert [(finding.thing, finding.words) for finding in report.findings] == (
        [(f"account {row['account']}", words)] if words else []
    )


@pytest.mark.parametrize(
    ("number", "changed", "words"),
    [
        (0, {}, None),
        (0, {"escrow": 90}, "account acme/tenant/-/day: 90 is in escrow, its slices have 100"),
        (0, {"whole": "acme/tenant/-/day"}, "account acme/tenant/-/day: it is a slice of another account than it says"),
        (1, {"whole": None}, "account acme/tenant/-/day+0: it is a slice of another account than it says"),
        (1, {"spent": 31}, "account acme/tenant/-/day+0: it holds and has spent more than is in escrow for it"),
        (1, {"warned_at": 1.0}, "account acme/tenant/-/day+0: it has a warning, which is given for its account"),
        (1, {"budget": "other"}, "account acme/tenant/-/day+0: a window of it names another budget"),
        (
            2,
            {"start": 0, "end": 86_400, "escrow": 0},
            "account acme/tenant/-/day: 100 is in escrow, its slices have 60",
        ),
    ],
)
def test_slices_have_what_their_account_put_in_escrow(
    number: int, changed: Mapping[str, Any], words: str | None
) -> None:
    account = "acme/tenant/-/day"
    usual = {"budget": account, "start": 86_400, "end": 172_800, "spent": 0, "overrun": 0, "warned_at": None}
    rows: list[dict[str, Any]] = [
        usual | {"account": account, "held": 100, "escrow": 100, "whole": None},
        usual | {"account": f"{account}+0", "held": 30, "escrow": 60, "whole": account},
        usual | {"account": f"{account}+1", "held": 0, "escrow": 40, "whole": account},
    ]
    rows[number] |= changed
    empty = Administration((), (), (), (), (), (), since=0.0)
    assert [f"{window.run}: {window.what}" for window in check_windows(rows, empty)] == ([words] if words else [])


OF_THE_STATE = (
    "size = size + 1",
    "verifiers = 'log.example/baton+0+0'",
    "sealed_at = sealed_at - 1",
    "xid = 7",
    "signer = 'x'",
    "catch_up = 'run_kept'",
)


@pytest.mark.parametrize("change", OF_THE_STATE)
def test_the_state_of_the_log_follows_from_its_entries(conn: Connection, subject: Subject, change: str) -> None:
    (finding,) = find_after_change(conn, f"UPDATE log_state SET {change}", subject.checkpoints)
    assert (finding.rule, finding.thing) == ("state", "the log")
    assert f"`{change.split()[0]}`" in finding.words


def test_a_log_that_still_seals_runs_from_before_it_is_no_finding_beside_a_live_service(
    conn: Connection, subject: Subject
) -> None:
    with conn.begin() as transaction:
        conn.execute(text("UPDATE log_state SET catch_up = ''"))
        report = verify(conn, subject.checkpoints, settled=False)
        transaction.rollback()
    assert (report.findings, "still being sealed" in " ".join(report.notes)) == ([], True)


def test_a_log_without_its_state_or_with_two_is_a_finding(conn: Connection, subject: Subject) -> None:
    words = [finding.words for finding in find_after_change(conn, "DELETE FROM log_state", subject.checkpoints)]
    assert "its state is not stored" in words
    second = "INSERT INTO log_state (id, size, xid) VALUES (2, 0, 0)"
    assert [finding.words for finding in find_after_change(conn, second, subject.checkpoints)] == [
        "it has more than one state"
    ]


def test_an_entry_is_about_the_run_that_its_row_names(conn: Connection, subject: Subject) -> None:
    change = "UPDATE log_leaves SET subject = 'run_later' WHERE id = 'fb0'"
    findings = [(finding.rule, finding.words) for finding in find_after_change(conn, change, subject.checkpoints)]
    assert ("entry", "the columns beside the entry say something else") in findings


def test_a_number_that_an_entry_names_as_text_is_a_finding(conn: Connection, subject: Subject) -> None:
    altered = "CAST(json_set(CAST(entry AS TEXT), '$.number', 'three') AS BLOB)"
    with conn.begin() as transaction:
        tampers.drop_triggers(conn)
        conn.execute(text(f"UPDATE log_leaves SET entry = {altered} WHERE kind = 'policy'"))
        conn.execute(text("UPDATE policies SET number = 4"))
        report = verify(conn, subject.checkpoints, settled=False)
        transaction.rollback()
    assert {"the log", "policy learns"} <= {finding.thing for finding in report.findings}


LEVELS = [(0, 21), (1, 5), (2, 1), (0, 0), (1, 0)]
"""Level and number of tiles of 87 entries, where a tile has four hashes: three of them are not full."""


@pytest.mark.parametrize("added", [b"", b"x", bytes(32)])
@pytest.mark.parametrize("place", LEVELS)
def test_every_stored_tile_has_the_hashes_of_the_entries_and_no_others(
    monkeypatch: pytest.MonkeyPatch, place: tuple[int, int], added: bytes
) -> None:
    monkeypatch.setattr(log_verify, "WIDTH", 4)
    entries = [StoredEntry(number, b'{"t": "key", "id": "k%d", "at": 1}' % number) for number in range(87)]
    stored: dict[tuple[int, int], bytes] = {}
    level, hashes = 0, [leaf_hash(entry.entry) for entry in entries]
    while hashes:
        parts = [hashes[at : at + 4] for at in range(0, len(hashes), 4)]
        stored |= {(level, number): b"".join(part) for number, part in enumerate(parts)}
        level, hashes = level + 1, [root_of(part) for part in parts if len(part) == 4]

    def rules() -> set[str]:
        check = LogCheck(Verification(), tiles=lambda *place: stored.get(place, b""), stored_tiles=len(stored))
        check.check(entries, None)
        return set(check.report.rules) - {"checkpoint"}  # there is none

    assert rules() == set()
    if added:
        stored[place] += added
    else:
        stored[place] = bytes([stored[place][0] ^ 1]) + stored[place][1:]
    assert rules()


def test_changes_that_no_pass_would_take_are_a_finding() -> None:
    """On Postgres a pass begins with the transaction that the state names."""
    for transaction, latest, passed_over, rules in ((90, 100, 0, []), (90, 100, 2, ["state"]), (900, 100, 2, [])):
        check = LogCheck(Verification())
        check.check_transactions(transaction, latest, passed_over)
        assert [finding.rule for finding in check.report.findings] == rules
        assert bool(check.report.notes) == (transaction > latest), "a database that was restored elsewhere counts anew"


@pytest.mark.parametrize("body", [b"[]", b"null", b'{"labels": 1, "wire": [1]}'])
@pytest.mark.parametrize("seq", [1, 2])
def test_a_body_of_another_shape_is_found_and_ends_nothing(
    conn: Connection, subject: Subject, body: bytes, seq: int
) -> None:
    change = text("UPDATE events SET body = :body WHERE run = 'run_kept' AND seq = :seq")
    with conn.begin() as transaction:
        tampers.drop_triggers(conn)
        assert conn.execute(change, {"body": body, "seq": seq}).rowcount == 1
        report = verify(conn, subject.checkpoints)
        transaction.rollback()
    assert "run run_kept" in {finding.thing for finding in report.findings}


@pytest.mark.long
@pytest.mark.parametrize("column", tampers.list_recorded_columns("runs"))
def test_every_column_of_a_run_is_sealed_or_follows_from_what_is(
    conn: Connection, subject: Subject, column: str
) -> None:
    """A new column is compared with the events in `app/audit/run_row.py` and in `app/audit/log/rows.py`, or named in
    `tampers.UNSEALED`."""
    outcomes = [attempt(conn, subject, way("runs", column), random.Random(1)) for way in (tampers.edit, tampers.fill)]
    made = [outcome for outcome in outcomes if outcome is not None]
    assert made
    assert [words for words, finding in made if finding is None] == []


@pytest.mark.parametrize("tamper", KNOWING, ids=[tamper.__name__ for tamper in KNOWING])
def test_a_tamper_is_found(subject: Subject, conn: Connection, tamper: Tamper) -> None:
    outcome = attempt(conn, subject, tamper, random.Random(7))
    assert outcome is not None
    words, first = outcome
    assert first is not None, words
    assert first.place is not None, words


def test_random_tampers_are_found(subject: Subject, conn: Connection) -> None:
    rnd = random.Random(3)
    outcomes = [attempt(conn, subject, rnd.choice(RANDOM), rnd) for _ in range(SEEDED)]
    missed = [outcome[0] for outcome in outcomes if outcome is not None and outcome[1] is None]
    assert missed == []
    assert len([outcome for outcome in outcomes if outcome is not None]) > SEEDED / 2


def test_every_table_is_a_record_or_listed_with_the_reason_why_it_is_none() -> None:
    """Whoever adds a table decides: it is sealed and tampers with it are tried, or the page says why it is none."""
    page = PAGE.read_text()
    sealed = page.partition("\nThe tables of record are ")[2].partition("\n")[0]
    listed = page.partition("\n**Tables that are no records.**")[2].partition("\n### ")[0]
    rows = [line.split("|")[1] for line in listed.splitlines() if line.startswith("| `")]
    records, others = set(re.findall(r"`(\w+)`", sealed)), set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert records == set(RECORDS)
    assert records | others == set(METADATA.tables)
    assert not records & others
    assert {source.table.name for source in log_sources.SOURCES.values()} <= records


def test_the_row_of_a_pruned_run_is_proved_by_its_own_salt(subject: Subject, conn: Connection) -> None:
    """Whoever deletes the salt could rewrite the row afterwards, because nothing else proves its tenant and times."""
    (finding,) = find_after_change(conn, "UPDATE log_leaves SET salt = NULL WHERE kind = 'pruned'", subject.checkpoints)
    assert (finding.rule, finding.thing) == ("altered", "pruned run_pruned")


def test_the_salt_of_an_entry_whose_row_has_changed_since_is_proved_by_the_next_one(
    subject: Subject, conn: Connection
) -> None:
    first = "(SELECT min(place) FROM log_leaves WHERE kind = 'key' AND id = 'key2')"
    (finding,) = find_after_change(
        conn, f"UPDATE log_leaves SET salt = x'00' WHERE place = {first}", subject.checkpoints
    )
    assert (finding.rule, finding.thing) == ("altered", "key key2")
    assert "earlier entry" in finding.words


def test_a_tag_of_a_run_that_is_not_stored_is_a_finding(subject: Subject, conn: Connection) -> None:
    """Also one that would be erased with the run's content, which no event demands."""

    def tamper(conn: Connection, _rnd: random.Random) -> str:
        conn.execute(text("INSERT INTO tags (name, value, run) VALUES ('user', 'ann', 'run_nowhere')"))
        return "a tag of no run"

    outcome = attempt(conn, subject, tamper, random.Random(1))
    assert outcome is not None
    assert outcome[1] is not None
    assert outcome[1].thing == "run run_nowhere"


def test_the_run_is_named_whose_event_was_altered(subject: Subject, conn: Connection) -> None:
    outcome = attempt(conn, subject, tampers.exclusions, random.Random(1))
    assert outcome is not None
    first = outcome[1]
    assert first is not None
    assert (first.rule, first.thing.partition("_")[0]) == ("altered", "run run")
    assert "one of the events 1 to 3 is not as it was sealed" in first.words


def test_yesterdays_backup_lacks_what_a_held_checkpoint_counts(subject: Subject) -> None:
    assert subject.yesterday is not None
    engine = create_engine(f"sqlite:///{subject.yesterday}")
    with engine.connect() as conn:
        report = verify(conn, subject.checkpoints)
    engine.dispose()
    assert report.first is not None
    assert report.first.rule == "held"
    assert "set back" in report.first.words
    assert report.first.place == subject.checkpoints[0][1].size


@pytest.mark.parametrize(
    "fields", [{"t": "log_key", "id": 5}, {"t": "run", "id": []}, {"t": "run", "id": "run_1", "root": 5}]
)
def test_an_entry_with_a_field_of_another_type_is_a_finding(fields: Mapping[str, object]) -> None:
    check = LogCheck(Verification())
    check.check([StoredEntry(0, json.dumps({"v": 1, "at": 1.0, "events": 1, **fields}).encode())], None)
    assert "is not in the form that the guide describes" in check.report.findings[0].words


@pytest.mark.parametrize("size", [0, 1, 2, 3, 255, 256, 257, 600])
def test_the_auditors_tree_is_that_of_the_log(size: int, tmp_path: Path) -> None:
    hashes = [leaf_hash(str(number).encode()) for number in range(size)]
    tree = GrowingTree()
    for leaf in hashes:
        tree.add(leaf)
    assert tree.root() == root_of(hashes) == tree_root(hashes)
    assert tiles_of(size) == len([tile for tile in tiles.tiles_of(size) if tile.level is not None])
    assert TilesFolder(tmp_path).tile(0, 0) == b""
