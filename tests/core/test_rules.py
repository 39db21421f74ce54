"""Rules of the pool file: decisions, and proofs about a change, against an evaluator that shares no code."""

import random

import pytest
from msgspec.structs import replace

from app.core.pool.catalog import ConductorSpec, ShadowSpec
from app.core.pool.policy import exclusion
from app.core.pool.policy_change import MOST_LABELS, recipients, widenings
from app.core.pool.rules import Match, Reading, Rule
from app.core.pool.snapshot import restore_catalog, snapshot
from app.errors import ConfigInvalid
from tests.core import information_flow, policies


@pytest.mark.parametrize("seed", range(3))
def test_decisions_are_those_of_the_text(seed: int) -> None:
    assert policies.disagreements(random.Random(f"decisions {seed}"), 60) == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.long
def test_every_widening_has_a_true_witness(seed: int) -> None:
    for old, new in policies.changes(random.Random(f"widenings {seed}"), 20, widen=True):
        all_widenings = list(widenings(old, new))
        assert all_widenings
        for widening in all_widenings:
            who = (widening.tier, widening.recipient.role, widening.recipient.worker, widening.recipient.provider)
            assert (*who, bool(widening.through), frozenset(widening.labels)) in policies.widens(old, new)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.long
def test_no_widening_is_invented(seed: int) -> None:
    for old, new in policies.changes(random.Random(f"narrowings {seed}"), 20, widen=False):
        assert list(widenings(old, new)) == []


@pytest.mark.parametrize("conducts", [True, False])
def test_a_shadow_shows_requests_to_those_who_carry_it_out(conducts: bool) -> None:
    old = policies.pool(random.Random("shadows"), workers=2)
    model = ConductorSpec("model", worker="w1") if conducts else ConductorSpec("fixed")
    mini = replace(old.tiers["mini"], pool=("w0",), fallback="w0", conductor=ConductorSpec("fixed"))
    ultra = replace(mini, name="ultra", pool=("w1",), fallback="w1", conductor=model)
    old = replace(old, tiers={"mini": mini, "ultra": ultra})

    def shown(shadow: ShadowSpec) -> list[tuple[str, str, str]]:
        new = replace(old, tiers={"mini": replace(mini, shadow=shadow), "ultra": ultra})
        assert list(widenings(new, old)) == list(widenings(new, new)) == []
        assert {(who.role, who.worker) for who in recipients(new, new.tiers["mini"])} >= {("worker", "w0")}
        return [(found.tier, found.recipient.role, found.recipient.worker) for found in widenings(old, new)]

    conducting = [("mini", "conductor", "w1")] if conducts else []
    assert shown(ShadowSpec(0.1, worker="w1")) == [("mini", "worker", "w1")]
    assert shown(ShadowSpec(0.1, tier="ultra")) == [("mini", "worker", "w1"), *conducting]
    assert shown(ShadowSpec(0.1, tier="ultra", mode="plan")) == conducting
    assert shown(ShadowSpec(0.1, conductor="w0-2")) == []


def test_more_labels_are_never_shown_to_more_workers() -> None:
    catalog = policies.pool(random.Random("monotone"))
    for worker in catalog.workers.values():
        for labels in policies.label_sets():
            if exclusion(worker, Reading(labels)):
                assert all(exclusion(worker, Reading(labels | {label})) for label in policies.LABELS)


def test_more_labels_than_can_be_enumerated_are_refused() -> None:
    catalog = policies.pool(random.Random("many"))
    rule = Rule("many", frozenset(f"label-{n}" for n in range(MOST_LABELS)), deny=Match(worker=frozenset({"w0"})))
    many = policies.compile_rules(policies.replace(catalog, rules=(rule,)))
    with pytest.raises(ConfigInvalid, match="labels"):
        list(widenings(catalog, many))


def test_rules_survive_the_snapshot() -> None:
    catalogs = [policies.pool(random.Random(f"snapshot {n}")) for n in range(50)]
    catalog = next(catalog for catalog in catalogs if len(catalog.rules) > 2)
    again = restore_catalog(snapshot(catalog))
    assert again.rules == catalog.rules
    assert again.workers == catalog.workers


def test_no_worker_reads_anything_derived_from_a_label_that_its_rules_forbid() -> None:
    flows = information_flow.explore(random.Random("flows"), 200, policies.pool, policies.passes_rules)
    assert flows.leaks == []
    assert flows.calls > 100
