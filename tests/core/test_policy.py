"""The workers that may work on a task: every exclusion has a reason, and the pool's order is kept."""

from typing import Any

import pytest
from msgspec.structs import replace

from app.core.message.chat import Image, Message, Task, Text, Tool, Toolbox
from app.core.pool.catalog import Card, Catalog, ConductorSpec, Limits, Tier, Worker
from app.core.pool.policy import Eligible, Overrides, exclude_ejected, exclusion, find_eligible, unknown_names
from app.core.pool.rules import Reading

CARDS = {
    "plain": Card(),
    "sees": Card(modalities=frozenset({"text", "image"}), tools=True),
    "cleared": Card(clearance=frozenset({"phi", "eu"})),
    "short": Card(context=100, tools=True),
}
TIER = Tier("mini", ("cleared", "plain", "short", "sees"), ConductorSpec("fixed"), "plain", {"medium": Limits()})
CATALOG = Catalog(
    {},
    {name: Worker(name, "stub", name, card=card) for name, card in CARDS.items()},
    {"mini": TIER},
    {"m": "mini"},
    "d",
)
SHORT = Task((Message("user", (Text("hi"),)),))
LONG = Task((Message("user", (Text("x" * 1_000),)),))
PICTURE = Task((Message("user", (Text("what?"), Image("data:x"))),))

TOOLS = replace(SHORT, toolbox=Toolbox((Tool("look"),)))
WORDY_TOOLS = replace(SHORT, toolbox=Toolbox((Tool("look", "x" * 1_000),)))


@pytest.mark.parametrize(
    ("task", "labels", "overrides", "excluded"),
    [
        (SHORT, (), Overrides(), {}),
        (LONG, (), Overrides(), {"short": "longer than its context"}),
        (PICTURE, (), Overrides(), dict.fromkeys(("cleared", "plain", "short"), "cannot see images")),
        (TOOLS, (), Overrides(), dict.fromkeys(("cleared", "plain"), "cannot call tools")),
        (
            WORDY_TOOLS,
            (),
            Overrides(),
            {**dict.fromkeys(("cleared", "plain"), "cannot call tools"), "short": "longer than its context"},
        ),
        (SHORT, ("phi",), Overrides(), dict.fromkeys(("plain", "short", "sees"), "not cleared for phi")),
        (
            SHORT,
            ("us", "phi"),
            Overrides(),
            {**dict.fromkeys(("plain", "short", "sees"), "for phi, us"), "cleared": "us"},
        ),
        (SHORT, (), Overrides(deny=frozenset({"plain"})), {"plain": "deny list"}),
        (SHORT, (), Overrides(allow=frozenset({"plain", "sees"})), dict.fromkeys(("cleared", "short"), "allow list")),
        (SHORT, (), Overrides(pin="sees"), dict.fromkeys(("cleared", "plain", "short"), "pinned")),
        (SHORT, (), Overrides(frozenset({"plain"}), frozenset({"plain"})), dict.fromkeys(TIER.pool, " list")),
    ],
)
def test_every_exclusion_has_its_reason(
    task: Task, labels: tuple[str, ...], overrides: Overrides, excluded: dict[str, Any]
) -> None:
    choice = find_eligible(CATALOG, TIER, task, Reading(frozenset(labels)), overrides)
    assert set(choice.excluded) == set(excluded)
    assert all(reason in choice.excluded[name] for name, reason in excluded.items())
    assert [worker.name for worker in choice.workers] == [name for name in TIER.pool if name not in excluded]


def test_names_that_the_pool_does_not_hold_are_told() -> None:
    overrides = Overrides(frozenset({"plain", "zoe"}), frozenset({"eve"}), "sees")
    assert unknown_names(TIER, overrides) == ("eve", "zoe")
    assert unknown_names(TIER, Overrides(pin="abe")) == ("abe",)
    assert unknown_names(TIER, Overrides()) == ()


@pytest.mark.parametrize(
    ("card", "labels", "missing"),
    [
        (Card(region="eu"), ("region:eu",), ()),
        (Card(region="us"), ("region:eu",), ("region:eu",)),
        (Card(retention="none"), ("retention:none",), ()),
        (Card(retention="30d"), ("retention:none",), ("retention:none",)),
        (Card(region="eu", retention="30d"), ("region:eu", "retention:none"), ("retention:none",)),
        (Card(), ("region:eu", "retention:none"), ("region:eu", "retention:none")),
        (Card(), ("region:None", "region:", "retention:None"), ("region:", "region:None", "retention:None")),
        (Card(region="eu", retention="eu"), ("eu",), ("eu",)),
        (Card(region="house", clearance=frozenset({"region:eu", "phi"})), ("region:eu", "phi"), ()),
    ],
)
def test_a_region_or_a_retention_is_what_the_card_says_and_nothing_where_it_says_nothing(
    card: Card, labels: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    worker = Worker("one", "stub", "one", card=card)
    assert exclusion(worker, Reading(frozenset(labels))) == (f"not cleared for {', '.join(missing)}" if missing else "")


def test_exclusions_are_sorted() -> None:
    assert exclusion(CATALOG.workers["cleared"], Reading(frozenset({"z", "phi", "a"}))) == "not cleared for a, z"


def test_a_model_id_means_a_tier_or_nothing() -> None:
    assert CATALOG.tier("m") is CATALOG.tier("mini") is TIER
    assert CATALOG.tier("large") is None


@pytest.mark.parametrize(
    ("ejected", "remaining"),
    [
        ((), "abcd"),
        (("b",), "acd"),
        (("b", "d"), "ac"),
        (("b", "d", "a"), "ac"),
        (("d", "c", "b", "a"), "ab"),
    ],
)
def test_ejected_workers_are_left_out_the_worst_first_while_two_remain(
    ejected: tuple[str, ...], remaining: str
) -> None:
    choice = Eligible(tuple(Worker(name, "stub", name) for name in "abcd"), {"e": "not cleared for phi"})
    healthy_choice = exclude_ejected(choice, dict.fromkeys(ejected, "failing"))
    assert "".join(worker.name for worker in healthy_choice.workers) == remaining
    assert healthy_choice.excluded == {"e": "not cleared for phi"} | dict.fromkeys(
        set("abcd") - set(remaining), "ejected: failing"
    )


def test_a_small_choice_is_never_narrowed() -> None:
    two = Eligible((Worker("a", "stub", "a"), Worker("b", "stub", "b")))
    assert exclude_ejected(two, {"a": "failing", "b": "misconfigured"}) == two
    assert exclude_ejected(Eligible(()), {}) == Eligible(())
