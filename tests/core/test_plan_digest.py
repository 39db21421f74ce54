"""The canonical form of a plan and its digest: other plans have other digests, the same plan always has the same."""

import pytest
from msgspec.structs import replace

from app.core.plan.digest import plan_digest, plan_form
from app.core.plan.workflow import Access, Step
from app.core.pool.catalog import Limits

LIMITS = Limits(tokens=400_000)
STEPS = (
    Step("ada", "Plan it.", Access(True), probability=0.4),
    Step("bob", "Do it: \u00fc.", Access(True, (0,)), answers=True),
)


def test_the_digest_of_a_plan_is_one_that_others_can_compute() -> None:
    """By any library that writes JSON with sorted keys, without spaces and in ASCII."""
    assert plan_form(STEPS[:1], LIMITS) == {
        "version": 1,
        "topology": "single",
        "steps": [{"worker": "ada", "instruction": "Plan it.", "access": ["user"], "answers": False, "tools": False}],
        "limits": {
            "attempts": 4,
            "depth": 0,
            "fan_out": 4,
            "output_tokens": 4096,
            "rounds": 1,
            "steps": 5,
            "tokens": 400_000,
            "milliseconds": 300_000,
            "usd_micros": 2_000_000,
        },
    }
    assert plan_digest(STEPS, LIMITS) == "da0817f76977bcded3a8b80ec341150ce803efe0d5b51ddee5ae8e472ace3f71"


@pytest.mark.parametrize(
    "other",
    [
        STEPS[:1],
        (*STEPS, STEPS[1]),
        (replace(STEPS[0], worker="bob"), STEPS[1]),
        (replace(STEPS[0], subtask="Plan it!"), STEPS[1]),
        (replace(STEPS[0], tools=True), STEPS[1]),
        (replace(STEPS[0], answers=True), STEPS[1]),
        (STEPS[0], replace(STEPS[1], access=Access(False, (0,)))),
        (STEPS[0], replace(STEPS[1], access=Access(True))),
        (STEPS[0], replace(STEPS[1], access=Access(True, (0,), previous=True))),
    ],
)
def test_a_plan_that_calls_otherwise_has_another_digest(other: tuple[Step, ...]) -> None:
    assert plan_digest(other, LIMITS) != plan_digest(STEPS, LIMITS)


def test_other_limits_give_another_digest() -> None:
    dearer = replace(LIMITS, usd=LIMITS.usd + 1)
    longer = replace(LIMITS, seconds=LIMITS.seconds + 0.5)
    assert len({plan_digest(STEPS, limits) for limits in (LIMITS, dearer, longer)}) == 3


def test_the_same_plan_has_the_same_digest_wherever_it_stands_in_its_run() -> None:
    """Neither the numbers of its steps, nor what a conductor thought of them, nor the order of an access list count."""
    later = (
        replace(STEPS[0], probability=None),
        replace(STEPS[1], access=Access(True, (7, 7))),
    )
    assert plan_digest(later, LIMITS, base=7) == plan_digest(STEPS, LIMITS)


def test_a_step_before_the_plan_is_not_confused_with_one_of_the_plan() -> None:
    earlier = (STEPS[0], replace(STEPS[1], access=Access(True, (0, 7))))
    assert plan_form(earlier, LIMITS, base=7)["steps"][1]["access"] == ["user", "run:0", 0]
