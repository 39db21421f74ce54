"""F-20: the journal is restored to a time before the last calls of some runs, while Redis and the providers are not.

The commands are those of deploy/docs/backups.md, "After a restore". Nothing runs twice, and what was billed and is
not in the journal any more is listed.
"""

import asyncio
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.accounts import accounts
from tests.faults.fleet import PRESENT, VERBS, Fleet, fleet
from tests.faults.points import at, case
from tests.harness import servers
from tests.harness.processes import ROOT, Process, open_caller, run_command
from tests.harness.servers import Server
from tests.harness.waiting import wait_until
from tests.integration.installation import CHAIN, execute
from tests.stubs import Reply

pytestmark = pytest.mark.timeout(300)
PAGE = ROOT / "deploy" / "docs" / "backups.md"
ARCHIVING = ("archive_mode=on", "archive_command=cp %p ../archive/%f")
SLOW_SECONDS = 3.0
"""How long the calls take that are open at the restore point."""
Restore = Callable[["BackedUpFleet"], "Iterator[Server]"]


@dataclass(slots=True)
class BackedUpFleet:
    """An installation whose database is backed up, and the time to which it is going to be restored."""

    scene: Fleet
    folder: Path
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))
    target: str = ""

    @property
    def gateway(self) -> Process:
        """The one there is."""
        return self.scene.processes["gateway"][0]

    @property
    def dump(self) -> Path:
        """A dump that was made at the restore point."""
        return self.folder / "dump"

    @property
    def backup(self) -> Path:
        """A base backup from before the restore point."""
        return self.scene.database.directory / "backup"

    @property
    def archive(self) -> Path:
        """The folder of the archived write-ahead log."""
        return self.scene.database.directory / "archive"

    def rows(self, statement: str) -> list[Any]:
        """Return the rows of a statement on the database as it is now."""
        return asyncio.run(execute(str(self.scene.environ["BATON_DATABASE_URL"]), statement))

    def ask(self, model: str, **more: Any) -> "Future[tuple[str, dict[str, Any]]]":
        """Ask a question; its answer comes."""
        return self.threads.submit(self._ask, model, more)

    def _ask(self, model: str, more: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        with open_caller(self.gateway.url) as caller:
            return caller.ask_whole(model, "Tell.", **more)


@contextmanager
def run_installation(folder: Path) -> Iterator[BackedUpFleet]:
    """A gateway and an engine; every step goes over Redis. A base backup was taken."""
    with fleet(folder, postgres=ARCHIVING) as scene:
        scene.environ = {**scene.environ, "BATON_STEPS": "spread"}
        new_installation = BackedUpFleet(scene, folder)
        new_installation.archive.mkdir()
        if scene.database.user is not None:
            shutil.chown(new_installation.archive, scene.database.user)
        PRESENT.migrate(folder, scene.environ)
        servers.base_backup(scene.database, new_installation.backup)
        for verb in VERBS:
            scene.add(PRESENT, verb, 1)
        scene.wait()
        yield new_installation
        new_installation.threads.shutdown()


@contextmanager
def from_archive(installation: BackedUpFleet) -> Iterator[Server]:
    """A server that has recovered to the restore point from the base backup and the archive."""
    with servers.restored(installation.backup, installation.archive, installation.target) as server:
        recovered = "SELECT 1 WHERE NOT pg_is_in_recovery()"
        wait_until(lambda: asyncio.run(execute(server.url, recovered)), what="the recovery is over")
        yield server


@contextmanager
def from_dump(installation: BackedUpFleet) -> Iterator[Server]:
    """A fresh server with the dump from the restore point."""
    with servers.postgres() as server:
        servers.load_dump(server, installation.dump)
        yield server


def procedure() -> list[list[str]]:
    """Return the commands that the page on back-ups has after a restore, without the word `baton`."""
    section = PAGE.read_text().partition("## After a restore\n")[2].partition("\n## ")[0]
    lines = [line.strip() for line in section.splitlines()]
    return [shlex.split(line)[1:] for line in lines if re.match(r"baton \w", line)]


def restore(kind: str, how: Any, *, ci: bool = False) -> object:
    place = f"the journal restored to an earlier time by {kind}"
    return case(how, family="F-20", place=place, expectation="nothing runs twice; what is missing is listed", ci=ci)


@pytest.mark.parametrize(
    "how", [restore("base backup and archive", from_archive, ci=True), restore("pg_dump", from_dump)]
)
def test_a_restored_journal_against_a_newer_redis_and_later_calls(
    tmp_path: Path, how: Any, record_property: Callable[[str, object], None]
) -> None:
    with run_installation(tmp_path) as installation:
        scene, stub = installation.scene, installation.scene.stub
        for name in ("alpha", "beta"):
            stub.always(name, Reply(chunks=("So.",)))
        baton_of_kept = installation.ask("baton-mini").result()[1]["baton"]
        open_ones = begin_runs_that_stay_open(installation)
        take_point(installation)
        answers = [future.result()[1]["baton"] for future in open_ones]
        for name in ("alpha", "beta"):
            stub.always(name, Reply(chunks=("So.",)))
        lost = [installation.ask("baton-mini").result()[1]["baton"] for _ in range(3)]
        scene.kill()
        installation.rows("SELECT pg_switch_wal()")
        wait_until(lambda: has_archived_all(installation), what="the log is archived")
        count_before = len(stub.requests())
        log = (tmp_path / f"dispatcher-{scene.processes['dispatcher'][0].port}.log").rename(tmp_path / "engine.log")
        with how(installation) as server:
            scene.environ = {**scene.environ, "BATON_DATABASE_URL": server.url}
            restored_at = carry_out(installation)
            report = json.loads(baton(installation, "restored", "--dry-run", "--json", "--log", str(log)))
            for verb in VERBS:
                scene.processes[verb][0].environ = scene.environ
                scene.processes[verb][0].start()
            scene.wait()
            again = installation.ask("baton-mini").result()[1]["baton"]
            runs = {run.id: run for run in accounts(server.url)}
            assert runs.keys() == {baton_of_kept["run"], *(entry["run"] for entry in answers), again["run"]}
            assert len(stub.requests()) == count_before + 1, "nothing is called again"
            for answer in answers:
                assert (runs[answer["run"]].row["state"], runs[answer["run"]].row["error"]) == ("failed", "restored")
                assert runs[answer["run"]].outcomes()[-1] == ["unknown"]
                assert runs[answer["run"]].row["held_usd"] == 0
                assert answer["run"] in restored_at
            assert scene.violations() == []
        missing = {entry["run"]: entry for entry in report["missing"] if not entry["known"]}
        assert {run: entry["usd"] for run, entry in missing.items()} == {
            entry["run"]: entry["cost_usd"] for entry in lost
        }
        assert report["open"] == []
    record_property("measured", f"{len(answers)} open runs ended, {len(lost)} lost runs listed")


def begin_runs_that_stay_open(installation: BackedUpFleet) -> Sequence["Future[tuple[str, dict[str, Any]]]"]:
    """A run of one step, and one whose second step follows: each has an open call when this returns."""
    stub = installation.scene.stub
    stub.always("beta", Reply(chunks=("Late.",), first_delay=SLOW_SECONDS))
    chain = installation.ask("baton-ultra", extra_body={"baton": {"plan": CHAIN}})
    wait_until(lambda: stub.requests("beta"), what="the second step is called")
    stub.always("alpha", Reply(chunks=("Late.",), first_delay=SLOW_SECONDS))
    before = len(stub.requests("alpha"))
    single = installation.ask("baton-mini")
    wait_until(lambda: len(stub.requests("alpha")) > before, what="the only step is called")
    return chain, single


def take_point(installation: BackedUpFleet) -> None:
    """Make this the restore point."""
    ((installation.target,),) = installation.rows("SELECT clock_timestamp()::text")
    servers.write_dump(installation.scene.database, installation.dump)
    assert installation.rows("SELECT count(*) FROM runs WHERE ended_at IS NULL")[0][0] == 2, "both are still open"


def has_archived_all(installation: BackedUpFleet) -> bool:
    """Return whether all that was written has been archived."""
    ((is_archived,),) = installation.rows(
        "SELECT last_archived_wal >= pg_walfile_name(pg_switch_wal()) OR last_archived_time > clock_timestamp() "
        "- interval '1 second' FROM pg_stat_archiver"
    )
    return bool(is_archived)


def carry_out(installation: BackedUpFleet) -> str:
    """Carry out the page's commands; what they print."""
    commands = procedure()
    assert [words[0] for words in commands] == ["migrate", "restored", "restored", "audit"]
    return "".join([baton(installation, *words) for words in commands])


def baton(installation: BackedUpFleet, *words: str) -> str:
    """Run a command in the installation's folder; what it prints."""
    result = run_command(installation.folder, installation.scene.environ, *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


@at("F-20", "`baton restored` while an engine is connected", "it refuses", ci=True)
def test_a_service_that_runs_is_left_alone(tmp_path: Path) -> None:
    with run_installation(tmp_path) as installation:
        result = run_command(tmp_path, installation.scene.environ, "restored")
        assert result.returncode == 2
        assert "stop them" in result.stderr
