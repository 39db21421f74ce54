"""Several gateways and dispatchers over one Postgres and one Redis, each of the present release or of an earlier one.

Unlike a `scene` they are run as an operator runs them, without anything wrapped around their seams, so that the tests
over them hold for any release.
"""

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from tests.faults.failed_journals import journals_kept_on_failure
from tests.faults.mixed_load import Client, all_runs, script
from tests.harness import servers
from tests.harness.processes import ROOT, Process, run_command
from tests.harness.servers import Server
from tests.harness.waiting import wait_until
from tests.integration.installation import RUN_SECONDS, settings
from tests.stubs.control import StubControl, stub_process

VERBS: Final = ("gateway", "dispatcher")
AUDIT_SECONDS: Final = 600.0
"""How long a command may take that reads all runs of a long load, such as the audit, on a busy machine."""
NEW_SETTINGS: Final = ("BATON_DRAIN_SECONDS",)
"""Settings that release 0.1.0 does not know, and so refuses."""


class Release(Struct, frozen=True):
    """The code of one release, in a folder of its own. None is the present one."""

    root: Path | None = None
    unknown: tuple[str, ...] = ()
    """Settings that it does not know, and so refuses."""

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return that environment, in which this release is imported. Its byte code is kept, for its next process."""
        if self.root is None:
            return dict(environ)
        known_settings = {name: value for name, value in environ.items() if name not in self.unknown}
        return {**known_settings, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": ""}

    def process(self, verb: str, folder: Path, environ: Mapping[str, str], **more: Any) -> Process:
        """A role of this release, which is not started yet."""
        return Process(verb, folder, self.environ(environ), forked=self.root is None, **more)

    def migrate(self, folder: Path, environ: Mapping[str, str]) -> None:
        """Apply this release's schema."""
        result = run_command(folder, self.environ(environ), "migrate")
        assert result.returncode == 0, result.stderr


PRESENT: Final = Release()


def unpack_release(commit: str, version: str, folder: Path, unknown: tuple[str, ...] = NEW_SETTINGS) -> Release | None:
    """Return the release of that commit, unpacked there under its own version; None where the clone does not have it.
    `unknown` are the settings that it does not know."""
    archive = subprocess.run(
        ["git", "archive", commit, "app", "migrations"], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data") if sys.version_info >= (3, 12) else files.extractall(folder)
    metadata = folder / f"baton-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: baton\nVersion: {version}\n")
    return Release(folder, unknown)


@dataclass(slots=True)
class Fleet:
    """All processes of one installation, and what they share."""

    folder: Path
    stub: StubControl
    environ: Mapping[str, str]
    database: Server
    processes: dict[str, list[Process]] = field(default_factory=lambda: {verb: [] for verb in VERBS})

    @property
    def urls(self) -> list[str]:
        """Return the URLs of the gateways; a gateway that is replaced keeps its own."""
        return [gateway.url for gateway in self.processes["gateway"]]

    def add(self, release: Release, verb: str, count: int) -> None:
        """Start so many more, without waiting for them."""
        for _ in range(count):
            process = release.process(verb, self.folder, self.environ)
            self.processes[verb].append(process)
            process.start(wait=False)

    def replace(self, release: Release, verb: str, place: int) -> None:
        """Stop one as a deployment does, and start one of that release at its address."""
        before = self.processes[verb][place]
        assert before.stop() == 0, before.log
        after = release.process(verb, self.folder, self.environ, port=before.port)
        self.processes[verb][place] = after
        after.start()
        self.wait()

    def kill(self) -> None:
        """End all of them."""
        for processes in self.processes.values():
            for process in processes:
                process.kill()

    def wait(self) -> None:
        """Wait until all have announced themselves, and the gateways are ready."""
        for processes in self.processes.values():
            for process in processes:
                process.wait_until_announced()
        for gateway in self.processes["gateway"]:
            wait_until(gateway.ready, what="the gateway is ready")

    def runs(self) -> list[dict[str, Any]]:
        """Return every run, as a gateway shows it, once all have ended."""
        client = Client(self.urls)

        def all_ended() -> list[dict[str, Any]] | None:
            runs = all_runs(client)
            return runs if all(run["ended_at"] for run in runs) else None

        runs: list[dict[str, Any]] = wait_until(all_ended, what="every run ends")
        return runs

    def violations(self) -> list[str]:
        """Return what the auditor of the present release finds wrong."""
        result = run_command(self.folder, self.environ, "audit", "check", "--json", within=AUDIT_SECONDS)
        assert result.stdout, result.stderr
        violations: list[str] = json.loads(result.stdout)["violations"]
        return violations


@contextmanager
def fleet(folder: Path, *, postgres: Sequence[str] = (), run_seconds: int = RUN_SECONDS) -> Iterator[Fleet]:
    """An installation without any process yet, and without a schema. All that it starts ends with the block.

    `postgres` are settings of the database server; `run_seconds` is the time limit of runs.
    """
    with ExitStack() as stack:
        stub = stack.enter_context(stub_process())
        database = stack.enter_context(servers.postgres(settings=postgres))
        redis = stack.enter_context(servers.redis())
        script(stub)
        new_fleet = Fleet(folder, stub, settings(folder, stub, database.url, redis.url, run_seconds), database)
        stack.callback(new_fleet.kill)
        with journals_kept_on_failure(folder, new_fleet.environ, database.url):
            yield new_fleet
