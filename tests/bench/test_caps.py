"""Runs with random caps of money, over the tasks of the rehearsal: a few of those that `tests.bench.caps` plays."""

from app.core.pool.catalog import MILLION
from tests.bench import capped_plans
from tests.bench.caps import TIERS, bands, play, svg, table


async def test_no_run_is_refused_whose_cap_bears_the_cheapest_worker_at_the_floor() -> None:
    """The service's auditor looks at each of them when they have ended."""
    runs = await play(40, "usd", 7)
    fit = [run for run in runs if run.fits]
    assert {run.tier for run in fit} == set(TIERS)
    assert [run for run in fit if not run.answered] == []
    assert {run.code for run in runs if not run.answered} == {"run_over_budget"}
    assert all(run.usd <= int(run.cap * MILLION) / MILLION for run in runs), "no run costs more than its cap"
    assert not any(run.usd for run in runs if not run.answered), "nothing is spent on what is refused"
    assert any(run.degraded for run in fit)
    assert len(table(runs, "usd")) == 2 + len(bands(runs)) + 1
    assert svg(runs, runs).count("<polyline") == 6
    assert svg(runs, []).count("<polyline") == 3


def test_the_best_fixed_plan_under_a_cap_is_chosen_on_other_tasks_than_it_is_judged_on() -> None:
    lucky = [capped_plans.CappedPlanRun(right=n % 2 == 0, answered=True, usd=0.1) for n in range(40)]
    steady = [capped_plans.CappedPlanRun(right=n % 5 < 3, answered=True, usd=0.2) for n in range(40)]
    lines, holds = capped_plans.table({(0.01, capped_plans.ULTRA): steady, (0.01, "a"): lucky, (0.01, "b"): steady})
    assert holds
    assert "| a; b |" in lines[-1] or "| b; a |" in lines[-1]
    better = [capped_plans.CappedPlanRun(right=True, answered=True, usd=0.1)] * 40
    assert not capped_plans.table({(0.01, capped_plans.ULTRA): steady, (0.01, "a"): better})[1]
