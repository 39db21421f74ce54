"""F-31: an installation is upgraded from an earlier release to the present one, and back, one process at a time under
load.

The schema is migrated first, while all processes are still of the earlier release; it stays when they come back. At any
time processes of both releases share one database and one Redis, and answer each other's runs.

Gateways of 0.1.0 drive what they admit; those of later releases leave that to engines, and an earlier process takes no
run that newer code has admitted. So runs of the new gateways wait until there is a new engine, and on the way back the
engines are replaced last. Runs that the earlier gateways have admitted need no new engine: processes of the earlier
release go on with them, also with the turns that their callers begin at a new gateway.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.faults.fleet import AUDIT_SECONDS, PRESENT, VERBS, Fleet, Release, fleet, unpack_release
from tests.faults.mixed_load import MixedLoad, run_mixed_load
from tests.faults.points import case
from tests.harness.processes import environment, run_command
from tests.harness.waiting import wait_until
from tests.integration.installation import execute

pytestmark = pytest.mark.timeout(1200)
RELEASES = {
    "0.1.0": "7090575c3f742f0e7a0399a836bf9378e3cdc6cd",
    "0.2.0": "aae0464d1cc294d04677a47170f75e31ec4748ee",
}
"""The last commit of each earlier release."""
COUNT = 2
"""Processes of each role."""
WAY_BACK = ("gateway", "dispatcher")
LONG_RUN_SECONDS = 120
"""The time limit of runs, some of which wait while two engines are replaced on a busy machine."""


def order(release: str, *verbs: str, ci: bool = False) -> object:
    place = f"all processes of {release} replaced under load, {verbs[0]}s first, and back, gateways first"
    values = (release, verbs)
    return case(*values, family="F-31", place=place, expectation="0 failed runs", ci=ci, name=f"{release} {verbs[0]}s")


@pytest.fixture(scope="module")
def earlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The earlier release of that version."""
    number = request.param
    release = unpack_release(RELEASES[number], number, tmp_path_factory.mktemp("release"))
    if release is None:
        pytest.skip(f"this clone does not have the commit of release {number}, {RELEASES[number]}")
    where = tmp_path_factory.mktemp("elsewhere")
    program = "import app, importlib.metadata; print(app.__file__, importlib.metadata.version('baton'))"
    command = [sys.executable, "-c", program]
    imported = subprocess.run(
        command, cwd=where, env=release.environ(environment(where)), capture_output=True, text=True
    )
    its_own = f"{release.root / 'app' / '__init__.py'} {number}"
    assert imported.stdout.strip() == its_own, "it runs its own code, and says so in what it admits"
    return release


@pytest.mark.parametrize(
    ("earlier", "verbs"),
    [
        order("0.2.0", "dispatcher", "gateway", ci=True),
        order("0.2.0", "gateway", "dispatcher"),
        order("0.1.0", "dispatcher", "gateway"),
        order("0.1.0", "gateway", "dispatcher"),
    ],
    indirect=["earlier"],
)
def test_an_upgrade_and_its_way_back_fail_no_run(
    tmp_path: Path, earlier: Release, verbs: tuple[str, ...], record_property: Callable[[str, object], None]
) -> None:
    with fleet(tmp_path, run_seconds=LONG_RUN_SECONDS) as scene:
        earlier.migrate(tmp_path, scene.environ)
        for verb in VERBS:
            scene.add(earlier, verb, COUNT)
        scene.wait()
        with run_mixed_load(scene.urls) as load:
            load.go_on()
            PRESENT.migrate(tmp_path, scene.environ)
            load.go_on()
            engines_first = verbs[0] == "dispatcher"
            replace_all(scene, PRESENT, verbs[0], load, answered=engines_first)
            if not engines_first:
                wait_until(
                    lambda: earlier_runs_have_ended(scene),
                    what="all runs of the earlier release end without a new engine",
                )
            replace_all(scene, PRESENT, verbs[1], load)
            for verb in WAY_BACK:
                replace_all(scene, earlier, verb, load)
        load.check()
        states = [run["state"] for run in scene.runs()]
        assert states == ["succeeded"] * load.conversations, "one run for each conversation"
        complete_ledger(scene)
        assert scene.violations() == []
    record_property("measured", f"{load.conversations} conversations, the slowest took {load.slowest:.1f} s")


def earlier_runs_have_ended(scene: Fleet) -> bool:
    """Return True if no run is open that code of another release than the present one has admitted."""
    query = f"SELECT 1 FROM runs WHERE ended_at IS NULL AND code <> '{version('baton')}'"
    return not asyncio.run(execute(scene.database.url, query))


def complete_ledger(scene: Fleet) -> None:
    """Derive the rows and the outcomes of disclosures that processes of an earlier release did not write."""
    result = run_command(scene.folder, scene.environ, "disclosures", "rebuild", within=AUDIT_SECONDS)
    assert result.returncode == 0, result.stderr


def replace_all(scene: Fleet, release: Release, verb: str, load: MixedLoad, *, answered: bool = True) -> None:
    """Replace every process of that role by one of that release; after each, every caller is answered, unless runs have
    to wait for an engine."""
    for place in range(COUNT):
        scene.replace(release, verb, place)
        if answered:
            load.go_on()
