"""Labels between the steps of a run: who may read what, who takes labels away, and what is refused."""

import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app.core.message.chat import Message, Text
from app.core.run.events import CallIntended, Kind, PlanRejected, PlanStep, StepDone, StepToolResults
from app.core.run.retention_classes import RunClass
from app.core.run.visibility import labels_in_run
from app.errors import InvalidRequest
from app.process.wiring import Runtime
from app.store.protocol import ContentQuery
from tests.harness.conversations import Conversation, look_call, tool_call_reply
from tests.harness.in_process import (
    Outcome,
    events,
    finish,
    limits_with,
    order,
    plan,
    plan_text,
    pool_text,
    running_service,
)
from tests.stubs import Fail, ProviderStub, Reply

PHI = frozenset({"phi"})
CARDS = {
    "alpha": 'clearance = ["phi"]',
    "gamma": 'clearance = ["phi"]\ndeclassifies = ["phi"]',
    "planner": 'clearance = ["phi"]\ndeclassifies = ["phi"]',
}
RULE = """
[rules.never-the-callers-words]
labels = ["source:caller"]
deny = { worker = ["beta"] }
"""


def pool(stub: ProviderStub) -> str:
    """Alpha and gamma may read `phi`, beta may not; gamma and the conductor leave it out of what they write."""
    text = pool_text(stub)
    for name, card in CARDS.items():
        text = text.replace(f"[workers.{name}]", f"[workers.{name}]\n{card}")
    for name in ("alpha", "beta", "gamma"):
        head, tail = text.split(f"[workers.{name}]")
        own = tail.replace("general", f"I am {name}", 1)
        text = f"{head}[workers.{name}]{own}"
    return text


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool(stub)) as running:
        yield running


async def carry_out_plan(runtime: Runtime, *steps: tuple[Any, str, list[Any]], labels: frozenset[str] = PHI) -> Outcome:
    """Carry out a plan of the caller's."""
    new_order = order(runtime, "baton-ultra", "The patient is Jo.", plan=plan(*steps), labels=labels)
    return await finish(await runtime.runs.start(new_order))


async def of_kind(runtime: Runtime, outcome: Outcome, kind: Kind) -> list[Any]:
    return [event.fact for event in await events(runtime, outcome.ended.state.run) if event.kind is kind]


def naming(*steps: tuple[str, str, list[Any]]) -> Callable[[Any], Reply]:
    """A conductor's reply with a plan over these workers, by the ordinals under which it is shown them."""

    def reply(received: Any) -> Reply:
        cards = received.json["messages"][0]["content"]
        ordinals = {name: int(number) for number, name in re.findall(r"Worker (\d+): strengths: I am (\w+)", cards)}
        return Reply(chunks=(plan_text(*((ordinals[worker], text, sees) for worker, text, sees in steps)),))

    return reply


async def test_what_is_derived_from_a_label_is_not_shown_to_a_worker_without_clearance(runtime: Runtime) -> None:
    with pytest.raises(InvalidRequest, match=r"step 1: .*not cleared for phi") as refused:
        await carry_out_plan(runtime, ("alpha", "Think", ["user"]), ("beta", "Answer", [0]))
    assert refused.value.public_code == "invalid_plan"


async def test_a_named_worker_takes_a_label_away_and_the_journal_says_so(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("gamma", Reply(chunks=("A patient.",)))
    outcome = await carry_out_plan(runtime, ("gamma", "Leave out the name", ["user"]), ("beta", "Answer", [0]))
    assert outcome.ended.state.state == "succeeded"
    assert "Jo" not in str(stub.requests_for("beta")[-1].json)
    done_steps: list[StepDone] = await of_kind(runtime, outcome, Kind.STEP_DONE)
    assert [outcome.declassified for outcome in done_steps] == [PHI, frozenset()]


async def test_a_step_that_reads_nothing_of_a_label_may_be_anybodys(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("beta", Reply(chunks=("A limerick.",)))
    outcome = await carry_out_plan(runtime, ("beta", "Write a limerick", []), ("alpha", "Answer", ["user", 0]))
    assert outcome.ended.state.state == "succeeded"
    assert len(stub.requests_for("beta")) == 1


async def test_a_replacement_that_takes_no_label_away_changes_who_may_go_on(
    stub: ProviderStub, runtime: Runtime
) -> None:
    """The plan was allowed with gamma in its first step; when alpha has done that, beta is not given the second."""
    stub.script("gamma", Fail(status=401))
    outcome = await carry_out_plan(runtime, ("gamma", "Leave out the name", ["user"]), ("beta", "Answer", [0]))
    assert outcome.ended.state.state == "succeeded"
    calls: list[CallIntended] = await of_kind(runtime, outcome, Kind.CALL_INTENDED)
    by_step = [(call.n, call.worker) for call in calls]
    assert by_step[:2] == [(0, "gamma"), (0, "alpha")]
    assert stub.requests_for("beta") == []
    assert ("beta", "not cleared for phi") in next(call for call in calls if call.n == 1).passed_over


async def test_a_conductors_plan_that_shows_too_much_is_repaired(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script(
        "planner",
        naming(("beta", "Answer.", ["user"])),
        naming(("gamma", "Leave out the name.", ["user"]), ("beta", "Answer.", [0])),
    )
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra", labels=PHI)))
    assert outcome.ended.state.state == "succeeded"
    rejected: list[PlanRejected] = await of_kind(runtime, outcome, Kind.PLAN_REJECTED)
    assert [rejection.reasons for rejection in rejected] == [
        ("step 0: its worker may not read what the step reads: not cleared for phi",)
    ]
    assert "not cleared for phi" in str(stub.requests_for("planner")[-1].json)
    assert len(stub.requests_for("beta")) == 1
    steps: list[PlanStep] = await of_kind(runtime, outcome, Kind.PLAN_STEP)
    assert {step.declassified for step in steps} == {PHI}


async def test_the_fallback_goes_to_a_worker_that_may_read_the_conversation(
    stub: ProviderStub, runtime: Runtime
) -> None:
    """The tier's own fallback is beta, which may not."""
    stub.always("planner", naming(("beta", "Answer.", ["user"])))
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra", labels=PHI)))
    assert outcome.ended.state.state == "succeeded"
    assert stub.requests_for("beta") == []


async def test_a_conductor_that_takes_no_label_away_leaves_only_cleared_workers(
    stub: ProviderStub, tmp_path: Path
) -> None:
    text = pool(stub).replace(CARDS["planner"], 'clearance = ["phi"]')
    stub.always("planner", naming(("alpha", "Answer.", ["user"])))
    async with running_service(tmp_path, text) as runtime:
        outcome = await finish(await runtime.runs.start(order(runtime, "baton-ultra", labels=PHI)))
    assert outcome.ended.state.admitted.pool == ("alpha", "gamma")
    assert outcome.ended.state.admitted.excluded == {"beta": "not cleared for phi"}


async def test_a_rule_lets_a_worker_see_outputs_of_steps_and_never_the_callers_words(
    stub: ProviderStub, tmp_path: Path
) -> None:
    async with running_service(tmp_path, pool(stub) + RULE) as runtime:
        none = frozenset[str]()
        with pytest.raises(InvalidRequest, match="excluded by the rule never-the-callers-words"):
            await carry_out_plan(runtime, ("beta", "Answer", ["user"]), labels=none)
        outcome = await carry_out_plan(runtime, ("alpha", "Think", ["user"]), ("beta", "Answer", [0]), labels=none)
        assert outcome.ended.state.state == "succeeded"
        assert len(stub.requests_for("beta")) == 1
        mini = order(runtime, "baton-mini", overrides=replace(order(runtime, "baton-mini").overrides, pin="beta"))
        with pytest.raises(InvalidRequest, match="excluded by the rule never-the-callers-words"):
            await runtime.runs.start(mini)


async def test_inside_a_step_nobody_reads_more_than_the_labels_allow(stub: ProviderStub, runtime: Runtime) -> None:
    outer = Reply(chunks=(plan_text((3, "Do it all", ["user"])),))
    stub.script("planner", outer, naming(("beta", "Answer.", ["user"])), naming(("alpha", "Answer.", ["user"])))
    limits = limits_with(runtime, "baton-nested", rounds=1)
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-nested", labels=PHI, limits=limits)))
    assert outcome.ended.state.state == "succeeded"
    rejected: list[PlanRejected] = await of_kind(runtime, outcome, Kind.PLAN_REJECTED)
    assert [rejection.proposal for rejection in rejected] == [1]
    assert "not cleared for phi" in rejected[0].reasons[0]
    assert stub.requests_for("beta") == []


async def test_a_further_round_reads_the_labels_of_the_one_before(stub: ProviderStub, runtime: Runtime) -> None:
    """The answer of the first round carries `phi`: the second one may not show it to beta."""
    stub.script(
        "planner",
        naming(("alpha", "Answer.", ["user"])),
        naming(("beta", "Better it.", ["previous"])),
        naming(("gamma", "Better it.", ["previous"])),
        Reply(chunks=('{"steps": []}',)),
    )
    outcome = await finish(await runtime.runs.start(order(runtime, "baton-deep", labels=PHI)))
    assert outcome.ended.state.state == "succeeded"
    rejected: list[PlanRejected] = await of_kind(runtime, outcome, Kind.PLAN_REJECTED)
    assert ["not cleared for phi" in rejection.reasons[0] for rejection in rejected] == [True]
    assert stub.requests_for("beta") == []


async def test_a_fixed_plan_that_shows_too_much_is_not_carried_out(stub: ProviderStub, tmp_path: Path) -> None:
    """The second round of this tier lets beta check the answer before; the first one's is the run's then."""
    rule = '\n[rules.words-of-callers-only]\nlabels = ["source:step"]\ndeny = { worker = ["beta"] }\n'
    async with running_service(tmp_path, pool(stub) + rule) as runtime:
        outcome = await finish(await runtime.runs.start(order(runtime, "baton-again")))
        rejected: list[PlanRejected] = await of_kind(runtime, outcome, Kind.PLAN_REJECTED)
    assert (outcome.ended.state.state, outcome.ended.answer) == ("succeeded", "Hello there.")
    assert "excluded by the rule words-of-callers-only" in rejected[0].reasons[0]
    assert stub.requests_for("beta") == []


async def test_the_labels_of_a_tools_result_go_with_what_is_made_of_it(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("beta", tool_call_reply(look_call("a")))
    conversation = Conversation(runtime, "baton-ultra", extra={"plan": plan(("beta", "", ["user"]))})
    conversation.add_results(await conversation.take_turn(), "Jo is ill.")
    conversation.messages[-1] = replace(conversation.messages[-1], labels=PHI)
    outcome = await conversation.take_turn(labels=PHI, on_messages=PHI)
    assert len(stub.requests_for("beta")) == 1
    assert stub.requests_for("alpha") or stub.requests_for("gamma")
    assert "labels" not in str([received.json for received in stub.requests])
    results: list[StepToolResults] = await of_kind(runtime, outcome, Kind.STEP_RESULTS)
    assert [result.labels for result in results] == [PHI]
    assert labels_in_run(outcome.ended.state) == PHI
    with_label = await runtime.context.store.runs_with_content(ContentQuery(within=RunClass(label="phi")))
    assert [row.id for row in with_label.runs] == [outcome.ended.state.run]


async def test_a_tools_result_that_nobody_may_read_is_refused(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("beta", tool_call_reply(look_call("a")))
    conversation = Conversation(runtime, "baton-ultra", extra={"plan": plan(("beta", "", ["user"]))})
    conversation.add_results(await conversation.take_turn(), "Jo is ill.")
    secret = frozenset({"secret"})
    conversation.messages[-1] = replace(conversation.messages[-1], labels=secret)
    with pytest.raises(InvalidRequest, match="beta: not cleared for secret") as refused:
        await conversation.take_turn(labels=secret, on_messages=secret)
    assert refused.value.public_code == "no_eligible_worker"


async def test_other_messages_get_no_labels_behind_the_runs_back(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("beta", tool_call_reply(look_call("a")))
    conversation = Conversation(runtime, "baton-ultra", extra={"plan": plan(("beta", "", ["user"]))})
    conversation.add_results(await conversation.take_turn(), "A")
    conversation.messages[0] = Message("user", (Text("What is it?"),), labels=PHI)
    with pytest.raises(InvalidRequest) as refused:
        await conversation.take_turn(labels=PHI, on_messages=PHI)
    assert refused.value.public_code == "labels_changed"


async def test_a_conductor_that_is_not_asked_for_want_of_a_price_widens_no_pool(
    stub: ProviderStub, tmp_path: Path
) -> None:
    """Where the fallback answers alone, it reads the conversation, and nothing that the conductor has written."""
    price = "price = { input = 1.00, output = 2.00, cached = 0.50 }\n"
    head, tail = pool(stub).split("[workers.planner]")
    async with running_service(tmp_path, f"{head}[workers.planner]{tail.replace(price, '', 1)}") as runtime:
        asked = order(runtime, "baton-ultra", "The patient is Jo.", labels=PHI, capped=True)
        state = (await finish(await runtime.runs.start(asked))).ended.state
        assert (state.admitted.conductor, state.admitted.pool) == ("fallback", ("alpha", "gamma"))
        assert [proposal.state for proposal in state.proposals] == ["accepted"]
