"""The pool file changes while runs go on: each call is held against the pool that it was made under."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.core.run.events import Kind
from app.errors import InvalidRequest
from app.process.config import reload
from app.process.wiring import Runtime
from tests.harness.audited import audit_report
from tests.harness.in_process import events, finish, order, plan, plan_text, pool_text, running_service
from tests.stubs import ProviderStub, Reply

CLEARED = '\nclearance = ["phi"]'


def pool(stub: ProviderStub, *cleared: str) -> str:
    """The pool of the tests; these workers are cleared for `phi`."""
    text = pool_text(stub)
    for name in cleared:
        text = text.replace(f"[workers.{name}]", f"[workers.{name}]{CLEARED}")
    return text


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool(stub, "alpha", "beta", "planner")) as running:
        yield running


def change(runtime: Runtime, text: str) -> None:
    """Write another pool file, and take it into force as SIGHUP does."""
    path = runtime.pool.configuration.settings.pool
    assert path is not None
    path.write_text(text)
    configuration, faults = reload(runtime.pool.configuration, {})
    assert not faults
    runtime.pool.install(configuration)


async def workers(runtime: Runtime, run: str) -> list[str]:
    """Return the workers that were called."""
    return [event.body["worker"] for event in await events(runtime, run) if event.kind is Kind.CALL_INTENDED]


async def test_other_prices_and_models_in_the_middle_of_a_run(stub: ProviderStub, runtime: Runtime) -> None:
    def raise_prices(_received: object) -> Reply:
        change(
            runtime, pool(stub).replace("output = 2.00", "output = 9.00").replace('model = "beta"', 'model = "beta-2"')
        )
        return Reply()

    stub.always("alpha", raise_prices)
    steps = plan(("alpha", "Think", ["user"]), ("beta", "Answer", ["user", 0]))
    run = (await finish(await runtime.runs.start(order(runtime, "baton-ultra", plan=steps)))).ended.state.run
    change(runtime, pool(stub).replace("output = 2.00", "output = 1.00"))
    calls = [event.body for event in await events(runtime, run) if event.kind is Kind.CALL_INTENDED]
    assert [call["model"] for call in calls] == ["alpha", "beta-2"]
    assert len({call["catalog"] for call in calls}) == 2
    report = await audit_report(runtime.pool.configuration.settings.database_url)
    assert (report.violations, report.rebuilt_requests) == ([], 2)


async def test_a_worker_that_lost_its_clearance_is_not_called(stub: ProviderStub, runtime: Runtime) -> None:
    def withdraw(_received: object) -> Reply:
        change(runtime, pool(stub, "alpha", "planner"))
        return Reply()

    stub.always("alpha", withdraw)
    steps = plan(("alpha", "Think", ["user"]), ("beta", "Answer", ["user", 0]))
    labels = frozenset({"phi"})
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra", plan=steps, labels=labels)))
    assert outcome.ended.state.state == "succeeded"
    assert await workers(runtime, outcome.ended.state.run) == ["alpha", "alpha"]
    assert stub.requests_for("beta") == []


async def test_a_conductor_that_lost_its_clearance_plans_no_more(stub: ProviderStub, runtime: Runtime) -> None:
    def withdraw(_received: object) -> Reply:
        change(runtime, pool(stub, "alpha", "beta"))
        return Reply(chunks=(plan_text((7, "Solve it", ["user"])),))

    stub.always("planner", withdraw)
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra", labels=frozenset({"phi"}))))
    assert [proposal.mode for proposal in outcome.ended.state.proposals] == ["first", "repair", "fallback"]
    assert len(stub.requests_for("planner")) == 1


RULE = """
[rules.patients-stay-with-alpha]
labels = ["phi"]
allow = { worker = ["alpha", "planner"] }
"""


async def test_a_worker_that_a_new_rule_excludes_is_not_called(stub: ProviderStub, runtime: Runtime) -> None:
    def add_the_rule(_received: object) -> Reply:
        change(runtime, pool(stub, "alpha", "beta", "planner") + RULE)
        return Reply()

    stub.always("alpha", add_the_rule)
    steps = plan(("alpha", "Think", ["user"]), ("beta", "Answer", ["user", 0]))
    labels = frozenset({"phi"})
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra", plan=steps, labels=labels)))
    assert await workers(runtime, outcome.ended.state.run) == ["alpha", "alpha"]
    assert stub.requests_for("beta") == []


async def test_the_journal_names_the_rule(stub: ProviderStub, runtime: Runtime) -> None:
    change(runtime, pool(stub, "alpha", "beta", "planner") + RULE)
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra", labels=frozenset({"phi"}))))
    excluded = outcome.ended.state.admitted.excluded
    assert excluded["beta"] == "excluded by the rule patients-stay-with-alpha"
    assert outcome.ended.state.admitted.pool == ("alpha",)


async def test_the_auditor_finds_a_call_against_a_rule(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.core.pool.policy.permits", lambda _worker, _reading: True)
    async with running_service(tmp_path, pool(stub, "alpha", "beta") + RULE, audits=False) as runtime:
        steps = plan(("beta", "Answer", ["user"]))
        await finish(await runtime.runs.start(order(runtime, "baton-ultra", plan=steps, labels=frozenset({"phi"}))))
        report = await audit_report(runtime.pool.configuration.settings.database_url)
    things = [violation.what for violation in report.violations if violation.rule == "rule"]
    assert any("keeps beta from the labels of what it reads" in words for words in things)


async def test_a_refusal_names_the_rules(stub: ProviderStub, runtime: Runtime) -> None:
    change(runtime, pool(stub, "alpha", "beta", "planner") + RULE.replace('"alpha", "planner"', '"planner"'))
    with pytest.raises(InvalidRequest, match="excluded by the rule patients-stay-with-alpha") as refused:
        await runtime.runs.start(order(runtime, "baton-ultra", labels=frozenset({"phi"})))
    assert refused.value.public_code == "no_eligible_worker"
