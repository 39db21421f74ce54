"""`baton restored` lists the steps of the logs that cost more than the journal knows of, and no others.

It refuses while anybody is connected.
"""

from pathlib import Path

import pytest

from app.cli.operations.after_restore import sum_logged_costs
from tests.cli.test_commands import baton
from tests.harness import servers


def test_the_turns_of_a_step_cost_exactly_what_they_cost_in_the_journal() -> None:
    """In dollars, 0.1 and 0.2 are a little more than 0.3, and the step was listed with $0.000000 more."""
    lines = [{"run": "run_1", "step": 0, "cost_usd": usd} for usd in (0.1, 0.2)]
    lines += [{"run": "run_1", "step": 1, "cost_usd": None}, {"run": "run_2", "step": 0, "cost_usd": 0.000007}]
    lines += [{"run": "run_3", "step": 0, "cost_usd": cost} for cost in ("dear", [1], float("nan"), -1.0, 10**400)]
    assert sum_logged_costs(lines) == {("run_1", 0): 300_000, ("run_1", 1): 0, ("run_2", 0): 7, ("run_3", 0): 0}


@pytest.mark.integration
def test_connections_that_a_pgbouncer_keeps_are_named_with_what_closes_them(
    tmp_path: Path, migrated_postgres_url: str
) -> None:
    """Those of the look before, which the guide has made with the same URL, are among them."""
    if servers.pgbouncer_binary() is None:
        pytest.skip("PgBouncer is not installed (Debian's package pgbouncer), and no wheel brings it")
    with servers.pgbouncer(migrated_postgres_url, "transaction", connections=4) as server:
        url = f"{server.url}?pgbouncer=transaction"
        look = baton(tmp_path, "restored", "--dry-run", BATON_DATABASE_URL=url)
        refused = baton(tmp_path, "restored", BATON_DATABASE_URL=url)
    direct = baton(tmp_path, "restored", BATON_DATABASE_URL=migrated_postgres_url)
    assert (look.status, refused.status, direct.status) == (0, 2, 0), direct.err
    assert "gateways or engines have" in refused.err
    assert "name the server itself in BATON_DATABASE_URL" in refused.err
