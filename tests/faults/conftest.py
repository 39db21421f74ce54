"""Marks and the table of the fault suite: every injection point with its expectation and what came of it."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.failed_journals import keep_journals
from tests.faults.scene import Scene

HERE = Path(__file__).parent
POINT = "point"
MEASURED = "measured"


@pytest.fixture(scope="module", autouse=True)
def swept() -> Iterator[None]:
    """Report what a file has left open with that file, and not with a later test in which it is collected."""
    yield
    gc.collect()


@pytest.fixture
def system(shared_scene: Scene) -> Scene:
    """The file's own `shared_scene` installation, as if it were new."""
    shared_scene.reset()
    return shared_scene


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder belongs to the suite; the points marked so belong to the subset of CI as well."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.faults_suite)
        points = list(item.iter_markers(POINT))
        if not points or any(point.kwargs.get("ci") for point in points):
            item.add_marker(pytest.mark.faults_ci)
        for point in points:
            item.user_properties.append((POINT, point.args))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Keep the journals of a failed test: those of a scene that others share are emptied for the next one."""
    report = yield
    scene = getattr(item, "funcargs", {}).get("system")
    if isinstance(scene, Scene) and report.when == "call" and report.failed:
        kept = keep_journals(scene.folder, scene.environ, scene.database, item.name)
        report.sections.append(("journals", kept))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The result table, and how many distinct injection points it has."""
    rows = sorted(set(_rows(terminalreporter)))
    if not rows:
        return
    terminalreporter.section("fault suite")
    wide = max(len(place) for _, place, *_ in rows)
    for family, place, expectation, result, seconds, measured in rows:
        measurement = f"  [{measured}]" if measured else ""
        terminalreporter.line(f"{family:8} {place:{wide}}  {result:7} {seconds:6.1f} s  {expectation}{measurement}")
    points = {row[:2] for row in rows}
    survived = points - {row[:2] for row in rows if row[3] != "passed"}
    terminalreporter.line(f"{len(points)} injection points, {len(survived)} survived")


def _rows(reporter: pytest.TerminalReporter) -> Iterator[tuple[str, str, str, str, float, str]]:
    """Family, place, expectation, result, seconds, and what the case measured."""
    for result in ("passed", "failed", "error"):
        for report in reporter.stats.get(result, ()):
            if getattr(report, "when", "") != "call" and result == "passed":
                continue
            properties = getattr(report, "user_properties", ())
            measured = "; ".join(str(value) for name, value in properties if name == MEASURED)
            for name, point in properties:
                if name == POINT:
                    family, place, expectation = point
                    yield family, place, expectation, result, round(report.duration, 1), measured
