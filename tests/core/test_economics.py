"""Reports over runs: what they count as a failure, and whose."""

from datetime import UTC
from typing import Any

import pytest

from app.core.rating.economics import JournaledRun, Report, ReportOptions
from app.core.run import drafts
from app.core.run.kinds import DRIVER_LOST, Kind
from app.core.run.progress import Finish, Propose
from tests.core.play import POOL, admission, number_events
from tests.core.test_progress import state_of


@pytest.mark.parametrize(
    ("reason", "outage", "cause"),
    [
        (DRIVER_LOST, True, "engine_lost"),
        ("worker_timeout", True, "conductor_failed"),
        ("the plan has no steps", False, "plan_rejected"),
    ],
)
def test_the_loss_of_an_engine_is_told_from_a_failure_of_the_conductor(reason: str, outage: bool, cause: str) -> None:
    opened = drafts.plan_opened(Propose(0, 0, "first"), "model", POOL, instant=False)
    facts: list[Any] = [opened, drafts.plan_rejected(0, "", [reason], outage=outage)]
    facts.append(drafts.run_ended(state_of(*facts), Finish(Kind.CANCELLED)))
    events = number_events(admission(tenant="acme"), *facts)
    report = Report(ReportOptions(), UTC)
    report.add(JournaledRun("run", "acme", "key", "mini", "cancelled", None, False, 0.0, True, events), None)
    failures = report.figures()["failures"]
    assert [failure["cause"] for failure in failures if failure["level"] == "plan"] == [cause]
