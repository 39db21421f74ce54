"""`baton restored` lists the steps of the logs that cost more than the journal knows of, and no others."""

from app.cli.operations.after_restore import sum_logged_costs


def test_the_turns_of_a_step_cost_exactly_what_they_cost_in_the_journal() -> None:
    """In dollars, 0.1 and 0.2 are a little more than 0.3, and the step was listed with $0.000000 more."""
    lines = [{"run": "run_1", "step": 0, "cost_usd": usd} for usd in (0.1, 0.2)]
    lines += [{"run": "run_1", "step": 1, "cost_usd": None}, {"run": "run_2", "step": 0, "cost_usd": 0.000007}]
    lines += [{"run": "run_3", "step": 0, "cost_usd": cost} for cost in ("dear", [1], float("nan"), -1.0, 10**400)]
    assert sum_logged_costs(lines) == {("run_1", 0): 300_000, ("run_1", 1): 0, ("run_2", 0): 7, ("run_3", 0): 0}
