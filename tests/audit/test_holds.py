"""Whatever was erased or pruned while a legal hold covered it is found, and nothing that was removed before a hold was
placed or after its release."""

import random
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from app.audit.check import Auditor
from app.audit.export import Export
from app.audit.holds import CLOCK_SECONDS, UNKNOWN_OWNER, UNKNOWN_TIME, HoldCheck, Removal, erasure_of, read_holds
from app.audit.log.findings import Verification
from app.audit.log.rows import check_database
from app.audit.log.verify import LogCheck
from app.audit.report import Report
from app.core.contents import content_ref
from app.core.message.chat import Message, Task, Text, task_to_json
from app.core.run.events import Kind
from app.errors import LegalHold
from app.providers.formats import adapter
from app.store.archive import open_archive
from app.store.journal_file import write
from app.store.protocol import USER_TAG, Hold, HoldScope, KeyRow
from app.store.rows import admin_events, content, holds, retention
from app.store.sealed_rows import in_one_snapshot
from app.store.sql import SqlStore, open_store
from tests.conformance.entries import SALT, admission_entry
from tests.conformance.test_store_retention import end_run, find_rest_of
from tests.harness.raw_facts import Raw
from tests.harness.sealing import seal_all

NAMES: Mapping[HoldScope, str] = {"run": "mine", "tenant": "acme", "key": "key1", "user": "ann"}
"""What the hold of each scope names, so that it covers the run `mine`, and not the run `other`."""
PROVEN: tuple[HoldScope, ...] = ("run", "tenant", "key")
"""The scopes of which the database itself says, after an erasure, that they covered a run."""


class Clock:
    """Stands in for the clock of the database: each look at it is a minute later, unless it is set."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self, _conn: object) -> float:
        self.now += 60.0
        return self.now


class Scene:
    """A store with two runs that have ended: of ann in one tenant, and of bob in another one."""

    def __init__(self, store: SqlStore, url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.url, self.clock = store, url, clock
        self._monkeypatch = monkeypatch

    async def add_runs(self) -> None:
        key = KeyRow("key1", "acme", "ci", b"d", frozenset({"runs:read"}), 1.0)
        await self.store.add_key(key)
        await self.store.add_key(replace(key, id="key2", tenant="else"))
        await self.add_run("mine", "ann", "acme", "key1")
        await self.add_run("other", "bob", "else", "key2")

    async def add_run(self, name: str, user: str, tenant: str, key: str) -> None:
        task = orjson.dumps(task_to_json(Task((Message("user", (Text("a question"),)),), user=user)))
        ref = content_ref(SALT, task)
        entry = admission_entry(name, 1.0, tenant=tenant, key=key)
        body = {"tier": "mini", "task": ref, "deadline": 500.0}
        events = (Raw(Kind.ADMITTED, body),)
        await self.store.append(replace(entry, events=events, contents=((ref, task),), tags=((USER_TAG, user),)))
        await self.store.append(end_run(name, 2.0))

    async def place(self, scope: HoldScope, name: str = "") -> None:
        await self.store.place_hold(Hold(f"hold_{scope}", scope, name or NAMES[scope], "", "case 12", 9.0, ""))

    async def release(self, scope: HoldScope) -> None:
        await self.store.release_hold(f"hold_{scope}", 9.0)

    async def prune(self, *runs: str) -> None:
        await seal_all(self.store)
        await self.store.prune([await find_rest_of(self.store, run) for run in runs])

    def ignore_holds(self) -> None:
        """Have the store erase and prune whatever it is asked to."""
        self._monkeypatch.setattr(holds, "find_by_run", lambda *_: {})

    async def check(self, *, against: Path | None = None) -> Report:
        async with open_archive(self.url) as archive:
            earlier = Export(against) if against is not None else None
            return await Auditor(self.clock.now, adapter).audit(archive, against=earlier)

    async def verify(self) -> Verification:
        await seal_all(self.store)
        async with open_archive(self.url) as archive:
            report = Verification()
            await in_one_snapshot(archive, partial(check_database, LogCheck(report), settled=True))
            return report


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=[pytest.mark.integration, pytest.mark.long])])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "postgres":
        return str(request.getfixturevalue("migrated_postgres_url"))
    return f"sqlite:///{tmp_path}/baton.db"


@pytest.fixture
async def scene(database: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    clock = Clock()
    for module in (admin_events, content, retention):
        monkeypatch.setattr(module, "clock", clock)
    async with open_store(database) as store:
        opened = Scene(store, database, clock, monkeypatch)
        await opened.add_runs()
        yield opened


def broken(report: Report) -> list[str]:
    return [str(violation) for violation in report.violations if violation.rule == "hold-broken"]


def held(report: Verification) -> list[str]:
    return [str(finding) for finding in report.findings if finding.rule == "hold"]


@pytest.mark.parametrize("scope", PROVEN)
@pytest.mark.parametrize("is_released", [False, True])
async def test_content_that_is_erased_under_a_hold_is_found(scene: Scene, scope: HoldScope, is_released: bool) -> None:
    await scene.place(scope)
    scene.ignore_holds()
    assert await scene.store.erase_contents(["mine", "other"], "retention") == 2
    if is_released:
        await scene.release(scope)
    words = f"its content was erased (cause: retention) while the legal hold hold_{scope} on its {scope} was in force"
    assert broken(await scene.check()) == [f"mine seq 0 hold-broken: {words}"]
    assert [finding.partition(": ")[2] for finding in held(await scene.verify())] == [words]


async def test_a_hold_on_a_key_of_all_tenants_covers_its_runs_in_other_tenants(scene: Scene) -> None:
    """Such a key may replay a run of another tenant, and the replay belongs to that tenant."""
    await scene.add_run("replay", "bob", "else", "key1")
    await scene.place("key")
    scene.ignore_holds()
    assert await scene.store.erase_contents(["other", "replay"]) == 2
    assert [words.partition(" ")[0] for words in broken(await scene.check())] == ["replay"]
    assert [words.split()[1] for words in held(await scene.verify())] == ["replay"]


@pytest.mark.parametrize("scope", ["run", "tenant"])
async def test_a_run_that_is_pruned_under_a_hold_is_found(scene: Scene, scope: HoldScope) -> None:
    await scene.place(scope)
    scene.ignore_holds()
    await scene.prune("mine", "other")
    words = f"it was pruned while the legal hold hold_{scope} on its {scope} was in force"
    assert broken(await scene.check()) == [f"mine seq 0 hold-broken: {words}"]
    assert [finding.partition(": ")[2] for finding in held(await scene.verify())] == [words]


@pytest.mark.parametrize("scope", ["key", "user"])
@pytest.mark.parametrize("way", ["erased", "pruned"])
async def test_an_earlier_export_says_whose_a_run_was(scene: Scene, tmp_path: Path, scope: HoldScope, way: str) -> None:
    """Without it the run is counted as one that may have been under the hold, and so is the one of another key."""
    export = tmp_path / "export.jsonl"
    async with open_archive(scene.url) as archive:
        await write(archive, export, now=1.0)
    await scene.place(scope)
    scene.ignore_holds()
    if way == "pruned":
        await scene.prune("mine", "other")
    else:
        await scene.store.erase_contents(["mine", "other"])
    alone, with_export = await scene.check(), await scene.check(against=export)
    if (scope, way) != ("key", "erased"):
        assert broken(alone) == []
        assert alone.unverifiable[UNKNOWN_OWNER] == 2
        assert any(UNKNOWN_OWNER in note for note in (await scene.verify()).notes)
    assert [words.partition(" ")[0] for words in broken(with_export)] == ["mine"]
    assert UNKNOWN_OWNER not in with_export.unverifiable


@pytest.mark.parametrize("scope", NAMES)
@pytest.mark.parametrize("seals_each", [False, True])
async def test_what_is_removed_before_a_hold_and_after_it_is_no_violation(
    scene: Scene, scope: HoldScope, seals_each: bool
) -> None:
    """Two holds overlap, one is placed twice, and what they cover is tried to be erased all the time."""

    async def pause() -> None:
        if seals_each:
            await seal_all(scene.store)

    names = ("mine", "early", "late")
    for name in names[1:]:
        await scene.add_run(name, "ann", "acme", "key1")
    await scene.store.erase_contents(["early"])
    await pause()
    await scene.place(scope, name="early" if scope == "run" else "")
    await pause()
    await scene.place("tenant" if scope != "tenant" else "user")
    await scene.place(scope, name="early" if scope == "run" else "")
    await pause()
    assert await scene.store.erase_contents([*names, "other"]) == 1
    with pytest.raises(LegalHold):
        await scene.store.erase("late")
    await scene.prune(*names)
    await pause()
    await scene.release(scope)
    await pause()
    assert await scene.store.erase_contents(names) == 0
    await scene.release("tenant" if scope != "tenant" else "user")
    await pause()
    assert await scene.store.erase_contents(["mine"]) == 1
    await pause()
    await scene.prune(*names)
    assert broken(await scene.check()) == []
    assert held(await scene.verify()) == []


async def test_the_order_of_the_log_finds_an_erasure_with_a_forged_date(scene: Scene) -> None:
    """Its date, which is sealed as well, says that it took place before the hold."""
    await scene.place("tenant")
    await seal_all(scene.store)
    scene.ignore_holds()
    scene.clock.now = 10.0
    await scene.store.erase_contents(["mine"])
    assert broken(await scene.check()) == []
    assert len(held(await scene.verify())) == 1


async def test_a_clock_that_goes_back_at_a_failover_makes_no_finding_where_the_log_has_the_order(scene: Scene) -> None:
    await scene.place("tenant")
    await seal_all(scene.store)
    await scene.release("tenant")
    await seal_all(scene.store)
    scene.clock.now -= 90.0
    await scene.store.erase_contents(["mine"])
    assert held(await scene.verify()) == []


async def test_a_hold_whose_row_is_gone_still_counts(scene: Scene) -> None:
    await scene.place("tenant")
    scene.ignore_holds()
    await scene.store.erase_contents(["mine"])
    await scene.store._write(lambda conn: conn.exec_driver_sql("DELETE FROM holds"))
    assert len(broken(await scene.check())) == 1


# -- the rule by itself


def change(seq: int, at: float, action: str, **fields: Any) -> Mapping[str, Any]:
    after = {"scope": "tenant", "name": "acme", "tenant": "acme"} | fields
    return {"seq": seq, "at": at, "action": f"hold.{action}", "target": "hold_1", "after": orjson.dumps(after)}


PLACED, RELEASED = change(1, 100.0, "placed"), change(2, 200.0, "released")


def erased(at: float | None, created_at: float = 1.0) -> Removal | None:
    row = {"id": "run_1", "tenant": "acme", "key": "k", "created_at": created_at, "salt": None, "erased_by": None}
    return erasure_of(row | {"erased_at": at})


def judge(removal: Removal | None, *changes: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether the removal is found, and the reason for which it cannot be verified."""
    check = HoldCheck(read_holds(changes))
    check.add(removal)
    return bool(list(check.find_broken(check.holds))), "".join(check.unverifiable)


@pytest.mark.parametrize(
    ("removal", "verdict"),
    [
        (erased(99.0), (False, "")),
        (erased(101.0), (False, "")),
        (erased(100.1 + CLOCK_SECONDS), (True, "")),
        (erased(199.9 - CLOCK_SECONDS), (True, "")),
        (erased(199.0), (False, "")),
        (erased(201.0), (False, "")),
        (erased(None), (False, UNKNOWN_TIME)),
        (erased(None, created_at=150.0), (False, UNKNOWN_TIME)),
        (erased(None, created_at=300.0), (False, "")),
    ],
)
def test_times_that_differ_by_less_than_clocks_do_prove_nothing(
    removal: Removal | None, verdict: tuple[bool, str]
) -> None:
    assert judge(removal, PLACED, RELEASED) == verdict


def test_a_run_that_is_younger_than_its_hold_was_erased_under_it_whenever_that_was() -> None:
    """Releases up to 0.2 noted no date and knew no holds."""
    assert judge(erased(None, created_at=150.0), PLACED) == (True, "")
    assert judge(erased(None, created_at=1.0), PLACED) == (False, UNKNOWN_TIME)


def test_a_hold_that_is_released_while_the_runs_are_read_does_not_count_afterwards() -> None:
    check = HoldCheck(read_holds([PLACED]))
    check.add(erased(300.0))
    assert list(check.find_broken(read_holds([PLACED, RELEASED]))) == []


def test_a_damaged_entry_of_the_log_covers_nothing() -> None:
    assert judge(erased(150.0), {**PLACED, "after": b"no JSON"}) == (False, "")


@pytest.mark.parametrize("seed", range(20))
def test_histories_of_a_service_that_keeps_its_holds_have_no_finding_and_others_have_each_of_theirs(seed: int) -> None:
    """Clocks differ by less than half of what the rule allows for. What happened close to the beginning or the end of a
    hold may be found or not."""
    chance = random.Random(seed)
    keeps_holds = seed % 2 == 0
    in_force: dict[str, tuple[str, str, float]] = {}
    changes: list[Mapping[str, Any]] = []
    removals: list[Removal | None] = []
    expected, possible = set(), set()
    now = 1_000.0
    for number in range(300):
        now += chance.choice((0.1, 4.0, 30.0))
        at = now + chance.uniform(-0.5, 0.5) * CLOCK_SECONDS
        scope, name = chance.choice((("tenant", "acme"), ("key", "k0"), ("key", "k1"), ("run", f"run_{number + 3}")))
        hold = f"hold_{number}"
        if chance.random() < 0.2:
            in_force[hold] = (scope, name, now)
            changes.append(change(number, at, "placed", scope=scope, name=name) | {"target": hold})
        elif in_force and chance.random() < 0.4:
            released = chance.choice(sorted(in_force))
            del in_force[released]
            changes.append(change(number, at, "released") | {"target": released})
        else:
            run, key = f"run_{number}", f"k{number % 3}"
            theirs = {("run", run), ("tenant", "acme"), ("key", key)}
            covering = [since for *of, since in in_force.values() if tuple(of) in theirs]
            if covering and keeps_holds:
                continue
            if covering:
                possible.add(run)
                if now - min(covering) > 2 * CLOCK_SECONDS:
                    expected.add(run)
            row = {"id": run, "tenant": "acme", "key": key, "created_at": 1.0, "salt": None, "erased_at": at}
            removals.append(erasure_of(row))
            now += 2 * CLOCK_SECONDS  # the end of the hold is far from this
    check = HoldCheck(read_holds(changes))
    for removal in removals:
        check.add(removal)
    found = {removal.run for removal, _ in check.find_broken(check.holds)}
    assert expected <= found <= possible
    assert bool(expected) != keeps_holds
