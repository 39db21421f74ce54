"""Erasing the content of many runs, and deleting all rows of old ones, on SQLite and on Postgres."""

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path

import asyncpg
import orjson
import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, func, select
from sqlalchemy.engine import make_url

from app.core.contents import content_ref
from app.core.message.chat import Message, Task, Text, task_to_json
from app.core.rating.feedback import Feedback
from app.core.run.events import Kind, RunAwaitingApproval, RunSucceeded
from app.core.run.retention_classes import RunClass
from app.engine.retention import erase_all, runs_with_text, texts_with_ref
from app.errors import NotFound
from app.store.archive import open_archive
from app.store.protocol import (
    APPROVAL_TAG,
    ASKED,
    FIRST_REVISION,
    METADATA_TAG,
    PLAN_TAG,
    REQUEST_TAG,
    RUN_PRUNED,
    TRACE_TAG,
    USER_TAG,
    Actor,
    AdminEventQuery,
    AppendResult,
    ContentQuery,
    Entry,
    Hold,
    Outbox,
    PrunedRun,
    PruneQuery,
    RunQuery,
    RunRow,
    Store,
    metadata_tag,
)
from app.store.rows import content, retention
from app.store.rows.content import copies
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.tables import METADATA, RUNS
from tests.conformance.entries import SALT, Opener, admission_entry, new_run, note
from tests.harness.raw_facts import Raw
from tests.harness.sealing import seal_all
from tests.harness.waiting import PATIENCE_SECONDS

QUESTION = "what-only-this-user-said"


def admission(
    run: str,
    user: str | None = "ann",
    at: float = 1.0,
    tenant: str = "tenant",
    text: str = QUESTION,
    identifier: str | None = None,
) -> Entry:
    """The admission of a run with a task of the user's."""
    echoed = {"safety_identifier": identifier} if identifier is not None else {}
    body = orjson.dumps(task_to_json(Task((Message("user", (Text(text),)),), user=user, echoed=echoed)))
    return replace(admission_entry(run, at, tenant=tenant), contents=((content_ref(SALT, body), body),))


async def runs_selected(store: Store, query: ContentQuery, limit: int = 200) -> list[str]:
    """The runs that a query selects, over all pages."""
    names: list[str] = []
    place = None
    while True:
        page = await store.runs_with_content(query, place, limit)
        names += [row.id for row in page.runs]
        if page.following is None:
            return names
        place = page.following


async def fill(store: Store, entries: Sequence[Entry]) -> None:
    for entry in entries:
        await store.append(entry)


@pytest.mark.long
async def test_runs_are_found_by_user_tenant_and_time_until_they_are_erased(store: Store) -> None:
    await fill(
        store,
        [
            admission("old", at=1.0),
            admission("new", at=9.0),
            admission("else", tenant="other", at=2.0),
            admission("bob", "bob", at=3.0, text='"user":"ann"'),
            admission("nobody", None, at=4.0),
            admission("quoted", 'a"n\\n', at=5.0),
        ],
    )
    quotes = b'{"user":"ann"} is what ann writes'
    await store.append(note("nobody", contents=((content_ref(SALT, quotes), quotes),)))
    await store.append(admission("hashed", None, at=6.0, identifier="ann-hash"))
    everything = ["old", "else", "bob", "nobody", "quoted", "hashed", "new"]
    for limit in (1, 2, 200):
        assert await runs_selected(store, ContentQuery(), limit) == everything
        assert await runs_selected(store, ContentQuery(user="ann"), limit) == ["old", "else", "new"]
    assert await runs_selected(store, ContentQuery(user="ann", tenant="tenant")) == ["old", "new"]
    assert await runs_selected(store, ContentQuery(user="ann", before=9.0)) == ["old", "else"]
    assert await runs_selected(store, ContentQuery(user='a"n\\n')) == ["quoted"]
    assert await runs_selected(store, ContentQuery(user="ann-hash")) == ["hashed"]
    assert await runs_selected(store, ContentQuery(user="an")) == []
    began = await store.clock()
    assert await store.erase_contents(["old", "nobody", "none"], "user") == 2
    assert await runs_selected(store, ContentQuery()) == ["else", "bob", "quoted", "hashed", "new"]
    assert await store.erase_contents(["old"], "retention") == 0
    assert await store.erase("bob")
    rows = {row.id: row for row in await store.runs(RunQuery(limit=20))}
    assert [rows[run].erased_by for run in ("old", "bob", "else")] == ["user", "request", None]
    assert began <= (rows["old"].erased_at or 0.0) <= await store.clock()
    assert rows["else"].erased_at is None


@pytest.mark.long
async def test_runs_are_found_by_their_class(store: Store, database: str) -> None:
    phi = (("label", "phi"),)
    await fill(store, [admission("bank", tenant="bank"), replace(admission("phi"), tags=phi)])
    await fill(store, [replace(admission("both", tenant="bank"), tags=phi), admission("none")])
    bank, labelled = RunClass(tenant="bank"), RunClass(label="phi")
    for within, without, names in (
        (bank, (), {"bank", "both"}),
        (labelled, (bank,), {"phi"}),
        (RunClass(tenant="bank", label="phi"), (), {"both"}),
        (RunClass(tier="mini"), (labelled,), {"bank", "none"}),
        (RunClass(tier="ultra"), (), set()),
        (None, (bank, labelled), {"none"}),
    ):
        assert set(await runs_selected(store, ContentQuery(within=within, without=without), 2)) == names
    await fill(store, [replace(end_run(run, 2.0), tags=()) for run in ("bank", "phi", "both", "none")])
    await seal_all(store)
    query = PruneQuery(ended_before=9.0, deadline_before=9e9, within=labelled, without=(bank,))
    async with open_archive(database) as archive:
        assert (await archive.count_prunable(query))[0] == 1


async def test_words_of_callers_in_tags_are_erased_with_the_content_and_pruned_with_the_run(store: SqlStore) -> None:
    tags = ((USER_TAG, "ann"), (METADATA_TAG, metadata_tag("team", "search")), ("label", "phi"))
    for run in ("one", "two", "kept"):
        await store.append(replace(admission(run), tags=tags))
        await store.append(end_run(run, at=2.0))
    assert await store.erase_contents(["one"]) == 1
    assert await store.prune([await find_rest_of(store, "two")]) == ["two"]
    assert [row.id for row in await store.runs(RunQuery(user="ann"))] == ["kept"]
    team = (METADATA_TAG, metadata_tag("team", "search"))
    assert [row.id for row in await store.runs(RunQuery(tags=(team,)))] == ["kept"]
    assert [row.id for row in await store.runs(RunQuery(tags=(("label", "phi"),), ascending=True))] == ["kept", "one"]


async def test_what_finds_plans_traces_and_approvals_is_pruned_with_the_run(store: SqlStore) -> None:
    tags = ((PLAN_TAG, FIRST_REVISION), (TRACE_TAG, "a" * 32))
    body = {"tier": "mini", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "wire": {"format": "plan"}}
    await store.append(replace(admission("one"), events=(Raw(Kind.ADMITTED, body),), tags=tags))
    waits = Entry("one", 1.5, (Raw(Kind.AWAITING_APPROVAL, {}),), epoch=1, tags=((APPROVAL_TAG, ASKED),))
    await store.append(waits)
    await store.append(replace(end_run("one", at=2.0), tags=()))
    assert await store.prune([await find_rest_of(store, "one")]) == ["one"]
    assert await store._read(lambda conn: conn.exec_driver_sql("SELECT * FROM tags WHERE run = 'one'").all()) == []


async def test_a_text_is_found_by_its_ref_wherever_the_tenant_has_it(store: SqlStore) -> None:
    await fill(store, [admission("first"), admission("again", "bob"), admission("foreign", tenant="other")])
    await fill(store, [admission("longer", text=f"{QUESTION} and more"), admission("free", text="something else")])
    ref, body = content_ref(SALT, QUESTION.encode()), QUESTION.encode()
    await store.append(note("first", contents=((ref, body),)))
    assert await store.runs_with_ref(ref) == ["first"]
    ((tenant, text),) = await texts_with_ref(store, store, ref)
    runs_with_word = [row.id async for rows in runs_with_text(store, tenant, text) for row in rows]
    assert sorted(runs_with_word) == ["again", "first"]
    with pytest.raises(NotFound):
        await texts_with_ref(store, store, "0" * 64)


async def test_erasing_leaves_the_journal_and_nothing_else(opener: Opener) -> None:
    async with opener() as store, opener() as other:
        await fill(store, [admission("one"), admission("two"), admission("kept")])
        ref = admission("one").contents[0][0]
        await store.rate(Feedback("fb", "one", "tenant", "key", 5.0, "explicit", "user", "", 1.0, "good", QUESTION))
        assert QUESTION.encode() in (await other.contents("one", [ref]))[ref]
        assert await other.erase_contents(["one", "two"]) == 2
        for run in ("one", "two"):
            assert (await store.run(run)).erased
            journal = await store.journal(run)
            assert (journal.salt, len(journal.events)) == (b"", 1)
            assert await store.contents(run, [ref]) == {}
        assert [(rating.label, rating.comment) for rating in await store.feedback("one")] == [("good", "")]
        assert not (await store.run("kept")).erased
        late = b"late"
        await store.append(note("one", contents=((content_ref(SALT, late), late),)))
        assert await store.contents("one", [content_ref(SALT, late)]) == {}


async def test_one_transaction_erases_a_bounded_part(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ERASED_RUNS", 3)
    monkeypatch.setattr(retention, "ERASED_BYTES", 3000)
    sizes = {"a": 2000, "b": 2000, "c": 10, "d": 10, "e": 10, "f": 5000, "g": 10}
    await fill(store, [admission(run, text="x" * size) for run, size in sizes.items()])
    groups = await store._read(lambda conn: retention.groups(conn, sorted(sizes)))
    assert groups == [["a"], ["b", "c", "d"], ["e"], ["f"], ["g"]]
    assert await store.erase_contents(sorted(sizes)) == len(sizes)


async def test_no_byte_is_left_in_the_files_of_sqlite(tmp_path: Path, opener: Opener, database: str) -> None:
    if not database.startswith("sqlite"):
        pytest.skip("Postgres overwrites erased rows itself, some time after VACUUM")

    def files_with(text: str) -> list[str]:
        return [path.name for path in tmp_path.iterdir() if text.encode() in path.read_bytes()]

    async with opener() as store:
        large = QUESTION * 2000
        await fill(
            store, [admission(f"run-{n:03}", text=large if n % 10 == 0 else f"{QUESTION}{n}") for n in range(100)]
        )
        await fill(store, [admission("kept", "bob", text="what-bob-said")])
        assert files_with(QUESTION)
        await store.erase_contents(await runs_selected(store, ContentQuery(user="ann")))
        assert await store.overwrite_erased()
        assert files_with(QUESTION) == []
        assert files_with("what-bob-said")
        assert await store.erase("kept")
        assert files_with("what-bob-said") == []


PAGE = Path(__file__).parents[2] / "deploy" / "docs" / "erasing.md"


@pytest.mark.integration
@pytest.mark.long
async def test_no_byte_is_left_in_the_files_of_postgres_after_what_the_page_says(migrated_postgres_url: str) -> None:
    statements = re.findall(r"`(VACUUM [^`]*(?:contents|pg_statistic)[^`]*)`", PAGE.read_text())
    assert len(statements) == 2
    words = {"text": QUESTION, "user": "only-this-user", "comment": "only-in-a-comment", "salt": SALT.decode()}
    url = make_url(migrated_postgres_url).set(drivername="postgresql").render_as_string(hide_password=False)
    superuser = await asyncpg.connect(url)

    async def find_words() -> dict[str, set[str]]:
        """The relations in whose files the words are."""
        await superuser.execute("CHECKPOINT")
        files = "SELECT relname, pg_read_binary_file(pg_relation_filepath(oid)) FROM pg_class WHERE relfilenode <> 0"
        files += " OR relname = 'pg_statistic'"
        found: dict[str, set[str]] = {}
        for relation, body in await superuser.fetch(files):
            for name, word in words.items():
                if word.encode() in body:
                    found.setdefault(name, set()).add(relation)
        return found

    async with open_store(migrated_postgres_url) as store:
        for number in range(40):
            run, mark = f"run-{number}", f"{number % 10}"
            entry = admission(run, words["user"] + mark, text=words["text"] + mark)
            await store.append(replace(entry, tags=((USER_TAG, words["user"] + mark),)))
            await store.append(end_run(run, 2.0))
            comment = words["comment"] + mark
            await store.rate(Feedback(f"fb-{run}", run, "tenant", "key", 5.0, "explicit", "user", "", 1.0, "", comment))
            kept = replace(
                admission(f"kept-{number}", f"bob{mark}", text=f"other{mark}"), tags=((USER_TAG, f"bob{mark}"),)
            )
            await store.append(replace(kept, new=new_run(salt=b"another-salt")))
        await superuser.execute("ANALYZE")
        assert (await find_words()).keys() == words.keys()
        await store.erase_contents([f"run-{number}" for number in range(40)])
    for statement in statements:
        await superuser.execute(statement)
    assert await find_words() == {}
    await superuser.close()


def end_run(run: str, at: float) -> Entry:
    """A plan with one step, a ticket that was taken for it, and the end of the run, in one entry."""
    events = (Raw(Kind.PLAN_STEP, {"worker": "alpha"}), RunSucceeded())
    return Entry(run, at, events, epoch=1, tags=(("worker", "alpha"), ("label", "phi")))


def with_label(entry: Entry) -> Entry:
    return replace(
        entry,
        events=(Raw(Kind.ADMITTED, {"tier": "mini", "labels": ["phi"], "request_id": "req"}),),
        tags=((REQUEST_TAG, "req"),),
    )


async def find_rest_of(store: SqlStore, run: str) -> tuple[PrunedRun, int]:
    """Return what a pruning must leave of a run, with the present revision of its row."""
    row = await store.run(run)
    left = PrunedRun(run, row.tenant, row.state, row.created_at, row.ended_at or 0.0, 99.0, row.seq, b"r" * 32, "there")
    revision = select(RUNS.c.revision).where(RUNS.c.id == run)
    return left, await store._read(lambda conn: int(conn.execute(revision).scalar_one()))


async def rows_of(store: SqlStore, run: str) -> dict[str, int]:
    """The number of rows that belong to a run, by table."""

    def count(conn: Connection) -> dict[str, int]:
        counts = {}
        for table in METADATA.sorted_tables:
            column = table.c.id if table.name in ("runs", "pruned_runs") else table.c.get("run")
            if column is not None:
                counts[table.name] = conn.execute(select(func.count()).where(column == run)).scalar_one()
        return {name: number for name, number in counts.items() if number}

    return await store._read(count)


async def test_pruning_leaves_one_row_of_a_run_and_nothing_of_any_other_table(opener: Opener) -> None:
    async with opener() as store, opener() as other:
        outbox_row = Outbox(0, "mini", "driver", holder="me", until=9.0)
        for run in ("one", "kept"):
            await store.append(replace(with_label(admission(run)), notify=True))
            await store.append(Entry(run, 2.0, epoch=1, outbox=(outbox_row,)))
            await store.append(end_run(run, at=2.0))
            await store.rate(Feedback(f"fb-{run}", run, "tenant", "key", 5.0, "explicit", "user", "", 1.0, "good", ""))
        everything = await rows_of(store, "one")
        assert everything.keys() == {"runs", "events", "contents", "tickets", "tags", "notices", "feedback"}
        left = await find_rest_of(store, "one")
        assert await other.prune([left]) == ["one"]
        assert await rows_of(store, "one") == {"pruned_runs": 1}
        assert await rows_of(store, "kept") == everything
        pruned_run = await store.pruned_run("one")
        assert replace(pruned_run, pruned_at=99.0) == left[0]
        assert abs(pruned_run.pruned_at - time.time()) < PATIENCE_SECONDS, "the time is that of the database's clock"
        for gone in (store.run("one"), store.journal("one"), store.pruned_run("kept"), store.append(note("one"))):
            with pytest.raises(NotFound):
                await gone
        assert [row.id for row in await store.runs(RunQuery(tags=(("label", "phi"),)))] == ["kept"]
        assert await store.prune([left]) == []


async def test_a_notice_of_an_approval_goes_with_its_run_even_if_it_was_given_up(store: SqlStore) -> None:
    question = RunAwaitingApproval(
        turn=0,
        proposal=1,
        digest="d",
        plan="p",
        until=9.0,
        seconds=1.0,
        reasons=("dear",),
        price=1,
        workers={},
        catalog="",
        discloses={},
        notifies=True,
    )
    await fill(store, [admission("one"), Entry("one", 1.5, (question,), epoch=1), end_run("one", 2.0)])
    (notice,) = await store.take_notices(9.0, 99.0, 10)
    assert await store.fail_notice(notice, 9.0, "HTTP 410")
    assert await store.prune([await find_rest_of(store, "one")]) == ["one"]
    assert await store.failed_notices(10) == ()


async def test_a_pruning_is_logged_with_its_author_unless_the_time_of_the_run_was_over(store: SqlStore) -> None:
    names = ("old", "ordered", "open")
    await fill(store, [admission(run) for run in names])
    await fill(store, [end_run(run, 2.0) for run in names[:2]])
    old, *others = [await find_rest_of(store, run) for run in names]
    assert await store.prune([old]) == ["old"]
    assert await store.prune(others, by=Actor("anna", "command")) == ["ordered"]
    (entry,) = await store.admin_events(AdminEventQuery(action=RUN_PRUNED))
    assert (entry.target, entry.actor, entry.via, entry.tenant) == ("ordered", "anna", "command", "tenant")
    assert entry.at == pytest.approx((await store.pruned_run("ordered")).pruned_at, abs=1.0)
    assert await store.admin_events(AdminEventQuery()) == (), "it is no change of what operators set"


async def test_a_run_that_is_open_or_was_changed_since_it_was_read_is_not_pruned(store: SqlStore) -> None:
    names = ("open", "late", "erased", "rated")
    await fill(store, [admission(run) for run in names])
    await fill(store, [end_run(run, 2.0) for run in names[1:]])
    revisions = [await find_rest_of(store, run) for run in names]
    await store.append(note("open"))
    await store.append(Entry("late", 3.0, (Raw(Kind.CALL_FINISHED, {}),), epoch=1))
    await store.erase("erased")
    rating = Feedback("fb", "rated", "tenant", "key", 5.0, "explicit", "user", "", 1.0, "good", "")
    await store.rate(rating)
    assert await store.prune(revisions) == []
    assert [len((await store.journal(run)).events) for run in names] == [2, 4, 3, 3]
    assert await store.feedback("rated") == (rating,)
    revisions = [await find_rest_of(store, "rated")]
    await store.rate(rating)  # sent again, which changes nothing
    assert await store.prune(revisions) == ["rated"]


async def test_only_runs_whose_time_and_deadline_are_over_are_selected(store: SqlStore, database: str) -> None:
    await fill(
        store,
        [admission("open"), admission("short"), admission("long", at=3.0), end_run("short", 5.0), end_run("long", 8.0)],
    )
    await seal_all(store)
    deadline = 500.0
    async with open_archive(database) as archive:
        assert await archive.count_prunable(PruneQuery(ended_before=9.0, deadline_before=deadline + 1)) == (2, 6)
        assert await archive.count_prunable(PruneQuery(ended_before=8.0, deadline_before=deadline + 1)) == (1, 3)
        assert await archive.count_prunable(PruneQuery(ended_before=9.0, deadline_before=deadline)) == (0, 0)


async def test_a_run_is_not_pruned_before_all_of_its_events_are_sealed(store: SqlStore, database: str) -> None:
    query = PruneQuery(ended_before=9.0, deadline_before=9e9)
    waiting = replace(query, unsealed=True)
    await fill(store, [admission("run"), end_run("run", 2.0)])
    async with open_archive(database) as archive:
        assert (await archive.count_prunable(query), await archive.count_prunable(waiting)) == ((0, 0), (1, 3))
        await seal_all(store)
        assert (await archive.count_prunable(query), await archive.count_prunable(waiting)) == ((1, 3), (0, 0))
        left = await find_rest_of(store, "run")
        await store.append(Entry("run", 3.0, (Raw(Kind.CALL_FINISHED, {}),), epoch=1))
        assert (await archive.count_prunable(query), await archive.count_prunable(waiting)) == ((0, 0), (1, 4))
    assert await store.prune([left]) == []


def test_one_transaction_prunes_a_bounded_part() -> None:
    sizes = {"a": 4, "b": 6, "c": 1, "d": 50, "e": 3, "f": 3}
    runs = [(PrunedRun(name, "tenant", "succeeded", 1.0, 2.0, 3.0, size, b"", ""), 1) for name, size in sizes.items()]
    groups = []
    for group in retention.pruning_groups(runs, 10):
        groups.append([left.id for left, _ in group])
    assert groups == [["a", "b"], ["c"], ["d"], ["e", "f"]]


def copy_of(origin: str, run: str) -> Entry:
    """The admission of a replay, which has the request of its origin."""
    entry = admission(run)
    assert entry.new is not None
    return replace(entry, new=replace(entry.new, origin_kind="replay", origin_run=origin))


async def test_a_run_that_was_erased_after_it_was_read_gets_no_copy(opener: Opener) -> None:
    """A replay and a shadow are admitted some milliseconds after the content of their origin was read."""
    async with opener() as store:
        await store.append(admission("origin"))
        copy = copy_of("origin", "copy")
        assert await store.erase("origin")
        (refused, other) = await asyncio.gather(
            store.append(copy), store.append(admission("other")), return_exceptions=True
        )
        assert isinstance(refused, NotFound)
        assert isinstance(other, AppendResult)
        assert [row.id for row in await store.runs(RunQuery())] == ["other", "origin"]
        assert await store.runs_with_ref(copy.contents[0][0]) == ["other"]


@pytest.mark.long
async def test_copies_that_are_admitted_during_an_erasure_are_erased_or_refused(opener: Opener) -> None:
    async with opener() as store, opener() as other:
        for number in range(8):
            origin, copy = f"origin{number}", f"copy{number}"
            await store.append(admission(origin))
            admitted, erased = await asyncio.gather(
                other.append(copy_of(origin, copy)), store.erase(origin), return_exceptions=True
            )
            assert erased is True
            assert isinstance(admitted, NotFound) or (await store.run(copy)).erased


async def test_a_copy_that_is_found_at_the_second_look_is_erased_as_well(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was being admitted when the copies were looked up, and the erasure waited for it at the row of its origin."""
    looked_up: list[str] = []

    def late(conn: Connection, run: str) -> tuple[str, ...]:
        looked_up.append(run)
        return copies(conn, run) if len(looked_up) > 1 else ()

    monkeypatch.setattr(content, "copies", late)
    async with opener() as store:
        await store.append(admission("origin"))
        await store.append(copy_of("origin", "copy"))
        assert await store.erase("origin")
        assert (await store.run("copy")).erased


async def test_an_erasure_leaves_sqlite_to_other_writers_between_its_transactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite has writers of other processes wait and look again: without a pause they hardly ever find it free."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(retention, "ERASED_RUNS", 1)
    async with open_store(f"sqlite:///{tmp_path / 'baton.db'}") as store:
        await fill(store, [admission("one"), admission("two")])
        monkeypatch.setattr(asyncio, "sleep", noted)
        assert await store.erase_contents(["one", "two"]) == 2
        monkeypatch.undo()
    assert len([seconds for seconds in pauses if seconds > 0]) == 2


async def test_a_copy_that_is_admitted_while_a_text_is_erased_is_erased_as_well(opener: Opener) -> None:
    """It is admitted after the runs with the text were looked for, and before the turn of its origin."""

    async def admit_a_copy(rows: Sequence[RunRow]) -> None:
        if [row.id for row in rows] == ["origin"]:
            await other.append(copy_of("origin", "copy"))

    async with opener() as store, opener() as other:
        await store.append(admission("origin"))
        ref = content_ref(SALT, QUESTION.encode())
        await store.append(note("origin", contents=((ref, QUESTION.encode()),)))
        ((tenant, text),) = await texts_with_ref(store, store, ref)
        erased = await erase_all(store, lambda: runs_with_text(store, tenant, text), admit_a_copy)
        assert erased.runs == 2
        assert (await store.run("copy")).erased


@pytest.mark.parametrize("value", [b"null", b"[]", b'"text"', b'{"safety_identifier":7}'])
async def test_an_output_that_looks_like_a_task_names_no_user(store: SqlStore, value: bytes) -> None:
    """A worker may write what it likes, also JSON with the fields of a task and other values in them."""
    output = b'{"messages":[],"user":"ann","echoed":' + value + b"}"
    task = admission("bob", "bob")
    event = Raw(Kind.ADMITTED, {"tier": "mini", "task": task.contents[0][0]})
    await fill(store, [replace(task, events=(event,)), admission("mine")])
    await store.append(note("bob", contents=((content_ref(SALT, output), output),)))
    await store.place_hold(Hold("hold", "user", "ann", "", "case 12", placed_at=5.0, placed_by=""))
    assert await runs_selected(store, ContentQuery(user="ann")) == ["mine"]
    assert await store.find_holds_by_run(["bob", "mine"]) == {"mine": "hold"}
