"""F-07 and F-08: the gateway that admitted a run is killed, and the engine that plans it: before the run exists,
while it is planned, answered and ended."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress

import httpx
import openai
import pytest
from msgspec import Struct
from msgspec.structs import replace

from app.core.run.events import TERMINAL, Kind
from tests.faults.accounts import Account, account, accounts, settle
from tests.faults.points import at, case
from tests.faults.scene import CHAIN, LEASE, TREE, Scene, ask, caller, scene
from tests.harness.processes import KEY, user_message
from tests.harness.waiting import wait_until
from tests.stubs import Reply

ADOPTED = LEASE + 2
"""Seconds after a kill within which somebody else drives the run."""
PLANNED = {"baton": {"plan": CHAIN}}


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("drivers")) as new_scene:
        yield new_scene


class Moment(Struct, frozen=True):
    """The moment at which the driver dies, and what the accounts show of it."""

    name: str
    order: str
    planning: tuple[str, ...] = ()
    """The outcomes of the planning calls, for a run that a model plans; empty: the caller gave the plan."""
    received: int = 0
    """How many of those reach the conductor."""
    proposals: tuple[str, ...] = ("accepted",)
    steps: tuple[list[str], ...] = (["ok"],)
    """What the attempts of a step of the plan that counts may come to."""


GIVEN = (
    Moment("after the admission, before headers", "append.after[run.admitted]"),
    Moment("before the run was offered", "ring.before"),
    Moment("after the run was offered", "ring.after"),
    Moment("as the first step was begun", "hear.after[step.queued]"),
    Moment("as the last step was begun", "hear.after[worker=epsilon]"),
    Moment("after the end, before the reply", "hear.after[run.succeeded]"),
)
AGAIN = ("rejected", "accepted")
PLANS = (
    Moment("after the plan was opened", "append.after[plan.opened]", ("ok",), 1, AGAIN),
    Moment("before the planning call's intent", "append.before[call.intended,worker=planner]", ("ok",), 1, AGAIN),
    Moment("before the planning call was sent", "stream.before[worker=planner]", ("unknown", "ok"), 1, AGAIN),
    Moment("while the plan streamed", "stream.piece[worker=planner]:3", ("unknown", "ok"), 2, AGAIN),
    Moment("after a step of the plan", "append.after[plan.step@1]", ("unknown", "ok"), 2, AGAIN),
    Moment("with the plan received", "stream.last[worker=planner]", ("unknown", "ok"), 2, AGAIN),
    Moment("before the plan was committed", "append.before[plan.accepted]", ("ok", "ok"), 2, AGAIN),
    Moment(
        "after the plan was committed", "append.after[plan.accepted]", ("ok",), 1, steps=(["ok"], ["unknown", "ok"])
    ),
)


def f07(moment: Moment) -> object:
    return case(
        moment,
        family="F-07",
        place=f"gateway killed {moment.name}",
        expectation="the run finishes elsewhere; no step twice",
        ci="reply" in moment.name or "headers" in moment.name,
        name=moment.name,
    )


def f08(moment: Moment) -> object:
    expectation = "planned once more, as a declared attempt" if len(moment.proposals) > 1 else "never planned again"
    place = f"engine killed {moment.name}"
    ci = "received" in moment.name or "committed" in moment.name
    return case(moment, family="F-08", place=place, expectation=expectation, ci=ci, name=moment.name)


@pytest.mark.parametrize("moment", [f07(moment) for moment in GIVEN])
def test_a_run_outlives_its_gateway(
    system: Scene, moment: Moment, record_property: Callable[[str, object], None]
) -> None:
    system.orders.lay(moment.order)
    answered = ask(system.gateway, "baton-ultra", extra_body=PLANNED)
    assert answered.status == 0, answered
    wait_until(lambda: not system.gateway.alive, within=10, what="the gateway is dead")
    run = account_of_finished_run(system, record_property)
    assert run.outcomes() == [["ok"]] * 5
    assert len(system.stub.requests()) == 5


@pytest.mark.parametrize("moment", [f08(moment) for moment in PLANS])
def test_a_plan_outlives_its_engine(
    system: Scene, moment: Moment, record_property: Callable[[str, object], None]
) -> None:
    system.stub.always("planner", replace(TREE, gap=0.02))
    system.orders.lay(moment.order)
    answered = ask(system.gateway, "baton-ultra")
    assert answered.status == 200, answered
    run = account_of_finished_run(system, record_property)
    assert tuple(run.planning()) == moment.planning
    assert len(system.stub.requests("planner")) == moment.received
    ends = (Kind.PLAN_ACCEPTED, Kind.PLAN_REJECTED)
    assert tuple(event.kind.value[5:] for event in run.events if event.kind in ends) == moment.proposals
    last = [step for step in run.bodies(Kind.PLAN_STEP) if step["proposal"] == len(moment.proposals) - 1]
    assert len(last) == 3
    for outcomes in run.outcomes()[-3:]:
        assert outcomes in moment.steps


@at("F-07", "gateway killed before the admission", "not accepted: no run, no call", ci=True)
def test_what_was_not_admitted_never_was(system: Scene) -> None:
    system.orders.lay("append.before[run.admitted]")
    assert ask(system.gateway, "baton-ultra").status == 0
    assert settle(system) == []
    assert accounts(system.database) == []
    assert system.stub.requests() == []


@at("F-07", "gateway killed in the middle of a stream", "the run finishes; what was told is its beginning", ci=True)
def test_a_stream_that_breaks_is_the_beginning_of_the_recorded_answer(
    system: Scene, record_property: Callable[[str, object], None]
) -> None:
    words = [f"word{n} " for n in range(40)]
    system.stub.always("alpha", Reply(chunks=tuple(words), gap=0.05))
    text = ""
    with caller(system.gateway) as client, suppress(openai.APIError, httpx.HTTPError):
        for chunk in client.client.chat.completions.create(
            model="baton-mini", messages=user_message("Tell."), stream=True
        ):  # type: ignore[call-overload]
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if text.count(" ") >= 5 and system.gateway.alive:
                system.gateway.kill()
    assert 5 <= text.count(" ") < 40
    wait_until(lambda: not system.gateway.alive, within=10, what="the gateway is dead")
    run = account_of_finished_run(system, record_property)
    assert run.outcomes() == [["ok"]], "the engine goes on with the call that it has begun"
    system.mend()
    with caller(system.gateway) as client:
        answer = client.read(f"/v1/runs/{run.id}/steps/0")["output"]
    assert answer == "".join(words)
    assert answer.startswith(text)


BACK = (
    Moment("after the admission", "append.after[run.admitted]"),
    Moment("in the middle of the answer", ""),
    Moment("as the last step was begun", "hear.after[worker=epsilon]"),
    Moment("before the final chunk", "hear.after[run.succeeded]"),
)

ANSWERED = {True: "hear.after[delta]:3", False: "hear.after[worker=epsilon]"}
"""The answer is on its way, and the gateway has just heard so: words of it, where they are told one by one."""


def back(moment: Moment, streams: bool) -> object:
    place = f"gateway killed {moment.name}, {'streamed' if streams else 'whole'}, asked again with its key"
    expectation = "one run; whoever comes back gets the same bytes, each time"
    ci = streams and "answer" in moment.name
    return case(moment, streams, family="F-07", place=place, expectation=expectation, ci=ci, name=place)


@pytest.mark.parametrize(("moment", "streams"), [back(moment, streams) for streams in (False, True) for moment in BACK])
def test_whoever_comes_back_gets_the_same_bytes(system: Scene, moment: Moment, streams: bool) -> None:
    words = tuple(f"word{n} " for n in range(20))
    system.stub.always("epsilon", Reply(chunks=words, gap=0.05))
    system.orders.lay(moment.order or ANSWERED[streams])
    assert send_again(system, streams) is None
    wait_until(lambda: not system.gateway.alive, within=10, what="the gateway is dead")
    system.mend()
    first, again, later = send_again(system, streams), send_again(system, streams), send_again(system, streams)
    assert first is not None
    assert again is not None
    assert again == later
    if streams:  # the first one may hear the answer while it is made, in pieces; from then on it is there
        assert text_of_stream(first) == text_of_stream(again) == "".join(words)
    else:
        assert first == again
    assert settle(system, 30) == []
    (run,) = accounts(system.database)
    assert run.row["state"] == "succeeded"
    assert "".join(words) in first if not streams else first.count('"content":"word') > 0
    with caller(system.gateway) as client:
        stored = client.read(f"/v1/runs/{run.id}/steps/4")["output"]
    assert stored == "".join(words)


def text_of_stream(stream: str) -> str:
    """Return the text of a stream's chunks; it must be whole."""
    assert stream.endswith("data: [DONE]\n\n")
    frames = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for frame in frames for choice in frame["choices"])


def send_again(system: Scene, streams: bool) -> str | None:
    """Return the whole reply to the same request with the same key; None if the connection breaks."""
    body = {"model": "baton-ultra", "messages": user_message("Tell."), "stream": streams, **PLANNED}
    headers = {"Authorization": f"Bearer {KEY}", "Idempotency-Key": "the same"}
    url = f"{system.gateway.url}/v1/chat/completions"
    try:
        reply = httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)
    except httpx.TransportError:
        return None
    assert reply.status_code == 200, reply.text
    return reply.text


@at("F-08", "engine killed, and its successor too", "a third one finishes; every attempt declared")
def test_a_plan_outlives_two_engines(system: Scene, record_property: Callable[[str, object], None]) -> None:
    system.orders.lay("stream.last[worker=planner]")
    calling = system.aside(ask, system.gateway, "baton-ultra")
    system.killed()
    system.mend()
    system.orders.lay("append.before[plan.accepted]")
    system.killed()
    assert calling.result(30).status == 200
    run = account_of_finished_run(system, record_property)
    assert run.planning() == ["unknown", "ok", "ok"]
    assert run.outcomes()[-3:] == [["ok"]] * 3


def account_of_finished_run(system: Scene, record_property: Callable[[str, object], None]) -> Account:
    """Return the run, once it has succeeded; how long it took until somebody wrote to its journal again."""
    assert settle(system, 30) == []
    run = account(system, system.latest())
    assert run.row["state"] == "succeeded"
    assert [event.kind for event in run.events if event.kind in TERMINAL] == [Kind.SUCCEEDED]
    if system.orders.obeyed_orders:
        killed = system.orders.obeyed_orders[-1].at
        later = [event.at - killed for event in run.events if event.at > killed]
        if later:
            record_property("measured", f"resumed after {later[0]:.1f} s")
            assert later[0] < ADOPTED
    return run
