"""Versions of a conductor: what stands after any changes, which ones are refused, and which run gets which version."""

from random import Random

import pytest

from app.audit.versions import VersionHistory
from app.core.pool.conductor_versions import (
    Change,
    ChangeKind,
    VersionsInForce,
    choose_version,
    refusal,
    versions_in_force,
)

KINDS: tuple[ChangeKind, ...] = ("loaded", "shadowed", "canary", "promoted", "rolled_back", "unloaded")


def stands(*steps: tuple[ChangeKind, str] | tuple[ChangeKind, str, float]) -> VersionsInForce:
    """Return the versions in force after these changes, none of which may be refused."""
    now = VersionsInForce()
    changes: list[Change] = []
    for n, (kind, version, *share) in enumerate(steps):
        assert not refusal(now, kind, version)
        changes.append(Change(str(n), float(n), "me", "planner", kind, version, *share))
        now = versions_in_force(changes)["planner"]
    return now


def test_a_version_goes_from_loaded_to_live_and_back() -> None:
    now = stands(("loaded", "a"), ("shadowed", "a"), ("canary", "a", 0.1))
    assert (now.live, now.canary, now.share) == ("", "a", 0.1)
    now = stands(("loaded", "a"), ("canary", "a", 0.1), ("promoted", "a"), ("loaded", "b"), ("canary", "b", 0.5))
    assert (now.live, now.canary, now.loaded) == ("a", "b", ("a", "b"))
    assert stands(("loaded", "a"), ("promoted", "a"), ("loaded", "b"), ("promoted", "b")).live == "b"


def test_rolling_back_ends_the_canary_then_goes_back_one_by_one() -> None:
    steps: list[tuple[ChangeKind, str] | tuple[ChangeKind, str, float]] = [
        ("loaded", "a"), ("promoted", "a"), ("loaded", "b"), ("promoted", "b"), ("loaded", "c"), ("canary", "c", 0.5),
    ]  # fmt: skip
    in_force = []
    for _ in range(3):
        steps.append(("rolled_back", ""))
        now = stands(*steps)
        in_force.append((now.live, now.canary))
    assert in_force == [("b", ""), ("a", ""), ("", "")]
    assert "nothing to roll back" in refusal(now, "rolled_back", "")


def test_a_rollback_that_comes_too_late_undoes_nothing_else() -> None:
    """Two of them at the same time undo once what both were about, and a rollback leaves alone what came before it."""
    steps: list[tuple[ChangeKind, str] | tuple[ChangeKind, str, float]] = [
        ("loaded", "a"), ("promoted", "a"), ("loaded", "b"), ("promoted", "b"), ("loaded", "c"), ("canary", "c", 0.5),
    ]  # fmt: skip
    twice = stands(*steps, ("rolled_back", "c"), ("rolled_back", "c"))
    assert (twice.live, twice.canary) == ("b", "")
    live = stands(*steps, ("rolled_back", "b"), ("rolled_back", "b"))
    assert (live.live, live.canary, live.share) == ("a", "c", 0.5)
    assert stands(*steps, ("promoted", "c"), ("rolled_back", "b")).live == "c"
    history = VersionHistory.from_changes(
        [Change(str(n), n, "me", "planner", "rolled_back", "b") for n in (7, 8)]
        + [Change(str(n), n, "me", "planner", "promoted", version) for n, version in ((1, "a"), (2, "b"))]
    )
    assert history.versions("planner", "run_1", 9, 9) == {"a"}, "as the auditor finds it"


@pytest.mark.parametrize("kind", ["shadowed", "canary", "promoted", "unloaded"])
def test_what_was_not_loaded_cannot_conduct(kind: ChangeKind) -> None:
    assert "is not loaded" in refusal(VersionsInForce(), kind, "a")
    assert "is not loaded" in refusal(stands(("loaded", "a"), ("unloaded", "a")), kind, "a")


def test_what_conducts_cannot_be_unloaded_and_what_is_gone_is_not_gone_back_to() -> None:
    both = stands(("loaded", "a"), ("promoted", "a"), ("loaded", "b"), ("canary", "b", 0.5))
    assert "still conducts" in refusal(both, "unloaded", "a")
    assert "still conducts" in refusal(both, "unloaded", "b")
    steps: tuple[tuple[ChangeKind, str], ...] = (("loaded", "a"), ("promoted", "a"), ("loaded", "b"), ("promoted", "b"))
    assert stands(*steps, ("unloaded", "a"), ("rolled_back", "")).live == ""
    assert stands(*steps, ("promoted", "a"), ("unloaded", "b"), ("rolled_back", "a")).live == "", "not a once more"
    assert stands(*steps, ("promoted", "a"), ("rolled_back", "a"), ("rolled_back", "b")).live == "a"


def test_only_what_is_loaded_ever_conducts() -> None:
    """Over any changes that are not refused."""
    random = Random(4)
    for _ in range(200):
        changes: list[Change] = []
        now = VersionsInForce()
        for n in range(20):
            kind, version = random.choice(KINDS), random.choice("abc")
            if refusal(now, kind, version):
                continue
            changes.append(Change(str(n), n, "me", "planner", kind, version, 0.5 if kind == "canary" else 0.0))
            now = versions_in_force(changes)["planner"]
            for run in ("x", "y", "z"):
                assert choose_version({"planner": now}, "planner", run) in ("", *now.loaded)


def test_a_canary_gets_its_share_of_the_runs_and_each_run_the_same_version() -> None:
    versions_by_name = {"planner": stands(("loaded", "a"), ("promoted", "a"), ("loaded", "b"), ("canary", "b", 0.2))}
    runs = [f"run_{n}" for n in range(4_000)]
    versions = [choose_version(versions_by_name, "planner", run) for run in runs]
    assert set(versions) == {"a", "b"}
    assert versions.count("b") / len(runs) == pytest.approx(0.2, abs=0.025)
    assert versions == [choose_version(versions_by_name, "planner", run) for run in runs]
    assert choose_version(versions_by_name, "another", "run_1") == ""
