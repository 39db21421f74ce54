"""Journals of released versions: this version folds each of them to what the release itself has recorded.

`tests/audit/record_journals.py` records them; a release that changes an event adds its own.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from app.core.pool.catalog import Limits
from app.core.run.events import FACT_CLASSES, Event, Fact, Kind
from app.core.run.fold import apply_fact, fold, state_of_admission
from app.core.run.state import RunState
from tests.core.journals import FOLDER, summary
from tests.core.test_arrows import DRAFTS
from tests.harness.raw_facts import fact_from_json

Line = dict[str, Any]
CHANGELOG = Path(__file__).parents[2] / "deploy/docs/changelog.md"
RUNS = sorted(path for path in FOLDER.glob("*/*.jsonl") if path.stem not in ("catalogs", "changes"))


def read(path: Path) -> tuple[Line, list[Line]]:
    """Return what the release has recorded of a run, and its events."""
    header, *rest = map(json.loads, path.read_text().splitlines())
    return header, [line for line in rest if "seq" in line]


def events(lines: list[Line], **more: Any) -> tuple[Event, ...]:
    """A journal with `more` in each body."""
    return tuple(Event("run", line["seq"], Kind(line["kind"]), line["at"], line["body"] | more) for line in lines)


def test_every_release_has_journals() -> None:
    """A release whose changes have a section is one that later releases must read."""
    sections = re.findall(r"^## (\S+)$", CHANGELOG.read_text(), re.MULTILINE)
    assert sorted(sections) == sorted({path.parent.name for path in RUNS})


def test_every_kind_of_event_and_every_end_is_in_some_journal() -> None:
    kinds = {line["kind"] for path in RUNS for line in read(path)[1]}
    assert kinds == {kind.value for kind in Kind}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_a_journal_of_a_release_folds_to_what_it_recorded(path: Path) -> None:
    header, lines = read(path)
    journal = events(lines)
    assert [fold(journal[:upto]).state for upto in range(1, len(journal) + 1)] == header["states"]
    summary_now, summary_then = json.loads(json.dumps(summary(fold(journal)))), header["summary"]
    assert summary_now["limits"].items() >= summary_then.pop("limits").items()
    assert {name: summary_now[name] for name in summary_then} == summary_then


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_fields_of_a_newer_release_change_nothing(path: Path) -> None:
    _, lines = read(path)
    newer = [line | {"body": json.loads(json.dumps(line["body"]))} for line in lines]
    newer[0]["body"]["limits"]["limit_of_tomorrow"] = 7
    assert fold(events(newer, field_of_tomorrow={"a": [1]})) == fold(events(lines))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_the_records_write_the_bodies_that_the_release_wrote(path: Path) -> None:
    """Key for key, so that whoever reads bodies sees no change: the auditor, the store, callers of the API."""
    for event in events(read(path)[1]):
        written = json.loads(json.dumps(event.fact.to_json()))
        if "limits" in event.body:  # a limit that is newer than the journal has its default
            assert written["limits"].items() >= event.body["limits"].items()
            written["limits"] = event.body["limits"]
        assert written == event.body


def test_usual_limits_are_recorded_as_the_first_release_reads_them() -> None:
    """0.1.0 cannot read an admission with a limit that it does not know, and runs beside newer releases."""
    _, (admission, *_) = read(FOLDER / "0.1.0" / "single.jsonl")
    assert Limits().to_json().keys() == admission["body"]["limits"].keys()
    for limits in (Limits(), Limits(floor_tokens=100)):
        assert Limits.from_json(limits.to_json()) == limits


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_runs_that_0_1_0_has_admitted_are_known(path: Path) -> None:
    """Processes of 0.1.0 may take these over, and then wait for tickets that later releases do not need."""
    assert fold(events(read(path)[1])).admitted.is_from_0_1_0 == (path.parent.name == "0.1.0")


def test_what_is_written_is_read_back_and_is_json_as_it_is() -> None:
    assert {fact.kind for fact in DRAFTS.values()} == set(Kind)
    for fact in DRAFTS.values():
        body = fact.to_json()
        assert json.loads(json.dumps(body)) == body, "there is no tuple in it, nor a set"
        assert fact_from_json(fact.kind, body) == fact
        assert Event.of("run", 1, 0.0, fact) == Event("run", 1, fact.kind, 0.0, body)


def test_each_kind_has_one_record() -> None:
    assert sorted(kind.kind for kind in FACT_CLASSES) == sorted(Kind)


@pytest.mark.parametrize("kind", Kind)
def test_an_event_without_what_no_run_can_go_on_without_is_refused(kind: Kind) -> None:
    whole = DRAFTS[kind].to_json()
    required = []
    for name in whole:
        if _is_refused(kind, {key: whole[key] for key in whole if key != name}):
            required.append(name)
    bare = {name: whole[name] for name in required}
    assert fact_from_json(kind, bare).kind is kind, "all others have defaults"


def _is_refused(kind: Kind, body: Line) -> bool:
    try:
        fact_from_json(kind, body)
    except KeyError:
        return True
    return False


def test_limits_of_another_release_are_read() -> None:
    """A newer process may have admitted the run, in the middle of a rolling upgrade; or an older one."""
    newer = Limits(steps=3).to_json() | {"limit_of_tomorrow": 7}
    assert Limits.from_json(newer) == Limits(steps=3)
    older = {name: value for name, value in newer.items() if name != "tool_wait"}
    assert Limits.from_json(older) == Limits(steps=3)


def _fold(facts: list[Fact]) -> RunState:
    state = state_of_admission("run", facts[0], 0.0, 1)
    for fact in facts[1:]:
        state = apply_fact(state, fact, 0.0)
    return state


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_facts_that_are_not_numbered_yet_fold_like_their_events(path: Path) -> None:
    journal = tuple(Event("run", event.seq, event.kind, 0.0, event.body) for event in events(read(path)[1]))
    assert _fold([event.fact for event in journal]) == fold(journal)
