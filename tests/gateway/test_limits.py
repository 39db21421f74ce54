"""A limit is declared in one place, `catalog.Limits`, and is known wherever limits are written or read.

`test_description.py` has the limits of the API's description, which takes long to make.
"""

import httpx
import pytest

from app.cli.runs import run_words
from app.core.pool.catalog import LIMITS, MILLION, Limit, Limits
from app.gateway.wire.parameters import Budget, narrow_limits
from app.process.config.entries import LimitsEntry

EVERY = pytest.mark.parametrize("limit", LIMITS.values(), ids=lambda limit: limit.name)


def test_the_table_has_every_limit() -> None:
    assert list(LIMITS) == list(Limits.__struct_fields__)
    assert all(limit.about.endswith(".") for limit in LIMITS.values())


@EVERY
def test_a_pool_file_may_set_it_within_its_range(limit: Limit) -> None:
    value: float = limit.most or 1
    entry = LimitsEntry.model_validate({limit.name: value}, strict=False)
    expected = value * MILLION if limit.unit == "usd" else value
    assert getattr(entry.core(Limits()), limit.name) == expected
    for wrong in (limit.least - 1, *([limit.most + 1] if limit.most is not None else [])):
        with pytest.raises(ValueError, match=limit.name):
            LimitsEntry.model_validate({limit.name: wrong})


@EVERY
def test_a_request_may_narrow_it_if_the_table_says_so_and_never_widens_it(limit: Limit) -> None:
    if limit.budget is None:
        with pytest.raises(ValueError, match="Extra inputs"):
            Budget.model_validate({limit.name: 1})
        return
    unit = MILLION if limit.unit == "usd" else 1
    limits = Limits(**{limit.name: 4 * unit})
    for requested, left in ((2, 2), (9, 4)):
        assert (
            getattr(narrow_limits(limits, Budget.model_validate({limit.name: requested}), None), limit.name)
            == left * unit
        )
    with pytest.raises(ValueError, match=limit.name):
        Budget.model_validate({limit.name: limit.budget + 1})


@EVERY
async def test_it_is_served_with_each_tier(limit: Limit, client: httpx.AsyncClient) -> None:
    models = (await client.get("/v1/models")).json()["data"]
    served = [limits for model in models for limits in model["baton"]["efforts"].values()]
    assert served
    assert all(limit.name in limits for limits in served)


def test_each_is_told_with_its_run_unless_it_goes_without_saying() -> None:
    bounds = Limits(rounds=2, depth=1).to_json() | {"usd": 1.5}
    assert run_words.limits({"limits": bounds}) == (
        "5 steps a round, 4 steps at once, 2 rounds, 1 level of nested workflows, 4 attempts a step, "
        "4,096 output tokens a call, 100,000,000 tokens, $1.50, 300.0 s, 600.0 s for tool results"
    )
    assert "round," not in run_words.limits({"limits": Limits().to_json()}).removeprefix("5 steps a round,")
