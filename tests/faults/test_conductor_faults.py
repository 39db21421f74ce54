"""F-29 and F-37: a conductor that is down, dead behind a healthy face, or says nonsense; plans without measure.

Each case has a conductor and a tier of its own, because what a process has learnt of a worker outlives a case.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec import Struct

from app.core.run.events import Kind
from tests.faults.accounts import account, accounts, settle
from tests.faults.network_proxy import NetworkProxy, Refuse
from tests.faults.points import at, case
from tests.faults.scene import TREE, WORKERS, Scene, ask, over, scene
from tests.stubs import Drop, Fail, Hang, Raw, Reply, Stall
from tests.stubs.control import StubControl
from tests.stubs.script import Behaviour

TRIPPED = 20.0
"""Seconds within which the fallback has answered: ten for a conductor that says nothing, and some for this machine."""
SECONDS = 25
STEPS = 5
Record = Callable[[str, object], None]


class Plight(Struct, frozen=True):
    """The behaviour of a conductor whenever it is asked, and how often a run asks it."""

    name: str
    family: str
    act: Behaviour
    call_count: int = 1
    ci: bool = False
    probed: bool = False
    """A probe finds it dead as well; a run that is planned after that asks nobody."""


def text(words: str) -> Reply:
    return Reply(chunks=tuple(words[start : start + 4096] for start in range(0, len(words), 4096)))


def steps(*them: dict[str, Any]) -> Reply:
    return text(json.dumps({"steps": list(them)}))


def step(worker: Any = 0, access: tuple[Any, ...] = ("user",), **more: Any) -> dict[str, Any]:
    return {"worker": worker, "subtask": "Do it.", "access": list(access), **more}


CONDUCTORS, BOMBS = "F-29", "F-37"
PLIGHTS = (
    Plight("resets every call", CONDUCTORS, Drop(), probed=True),
    Plight("is dead while its server lives", CONDUCTORS, Hang(), ci=True, probed=True),
    Plight("dies in the middle of its plan", CONDUCTORS, Reply(chunks=TREE.chunks, fault=Stall(after=3))),
    Plight("fails with 500", CONDUCTORS, Fail(status=500), probed=True),
    Plight("is not known there", CONDUCTORS, Fail(status=404), probed=True),
    Plight("says a web page", CONDUCTORS, Raw(body="<html>no</html>", content_type="text/html")),
    Plight("says prose for ever", CONDUCTORS, text("I would rather talk about the weather."), call_count=2, ci=True),
    Plight("says no steps", CONDUCTORS, steps(), call_count=2),
    Plight("names a worker that is not in the pool", CONDUCTORS, steps(step(99)), call_count=2, ci=True),
    Plight("names a worker by name", CONDUCTORS, steps(step("alpha")), call_count=2),
    Plight("says nothing", CONDUCTORS, Reply(chunks=()), call_count=2),
    Plight("plans ten thousand steps", BOMBS, steps(*[step() for _ in range(10_000)]), ci=True),
    Plight("lets a step see itself", BOMBS, steps(step(access=("user", 0))), call_count=2),
    Plight("lets two steps see each other", BOMBS, steps(step(access=(1,)), step(access=(0,))), call_count=2, ci=True),
    Plight("never stops planning", BOMBS, Reply(chunks=('{"steps": [', *[" "] * 200), endless=True, gap=0.01)),
    Plight("nests ten thousand levels", BOMBS, text('{"steps": ' + "[" * 10_000), call_count=2),
    Plight("writes a subtask of 4 MB", BOMBS, steps(step() | {"subtask": "x" * 4_000_000})),
    Plight("plans itself again as a step", BOMBS, steps(step(-1)), call_count=2),
)


def pools(stub: StubControl, to_stub: NetworkProxy) -> str:
    """Return a conductor and a tier for each case; a sound one for the control; and one whose calls go to ourselves."""
    openai_url, vllm_url = over(to_stub, stub)
    parts = [
        f'[providers.stub]\nformat = "openai"\nbase_url = "{openai_url}"\nkey = "STUB_KEY"\n',
        f'[providers.planning]\nformat = "openai"\nbase_url = "{vllm_url}"\nkey = "STUB_KEY"\n'
        "options = { positional = true, logprobs = true }\ndeadlines = { first = 20, gap = 20 }\n",
    ]
    parts += [
        f'[workers.{name}]\nprovider = "stub"\nmodel = "{name}"\nprice = {{ input = 1, output = 2 }}\n'
        for name in WORKERS
    ]
    names = ", ".join(f'"{name}"' for name in WORKERS)
    for n in range(len(PLIGHTS) + 1):
        parts.append(
            f'[workers.planner-{n}]\nprovider = "planning"\nmodel = "planner-{n}"\npooled = false\n'
            f"[tiers.baton-{n}]\npool = [{names}]\nlimits = {{ seconds = {SECONDS}, steps = {STEPS} }}\n"
            f'conductor = {{ kind = "model", worker = "planner-{n}", probe = 1.5 }}\n'
        )
    return "".join(parts)


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("conductors"), dispatchers=1, pools=pools) as new_scene:
        yield new_scene


@pytest.fixture
def system(shared_scene: Scene) -> Scene:
    shared_scene.reset()
    shared_scene.stub.always(f"planner-{len(PLIGHTS)}", TREE)
    return shared_scene


def plight(number: int) -> object:
    plight_case = PLIGHTS[number]
    place = f"conductor {plight_case.name}"
    repaired = "repaired once, then " if plight_case.call_count == 2 else ""
    expectation = f"{repaired}the fallback answers, degraded; others unaffected"
    return case(number, family=plight_case.family, place=place, expectation=expectation, ci=plight_case.ci, name=place)


@pytest.mark.parametrize("number", [plight(number) for number in range(len(PLIGHTS))])
def test_the_fallback_takes_over(system: Scene, number: int, record_property: Record) -> None:
    plight_case = PLIGHTS[number]
    system.stub.always(f"planner-{number}", plight_case.act)
    asking = system.aside(ask, system.gateway, f"baton-{number}", timeout=60)
    control = ask(system.gateway, f"baton-{len(PLIGHTS)}", timeout=30)
    assert (control.status, control.document["baton"]["degraded"]) == (200, False)
    answered = asking.result(60)
    assert settle(system) == []
    run = account(system, answered.run)
    record_property("measured", f"{', '.join(run.planning())}; answered after {answered.seconds:.1f} s")
    assert (answered.status, answered.document["baton"]["degraded"]) == (200, True)
    assert (run.row["state"], run.row["degraded"]) == ("succeeded", True)
    assert run.outcomes()[-1] == ["ok"]
    assert len(run.planning()) in ({0, plight_case.call_count} if plight_case.probed else {plight_case.call_count})
    assert len(run.bodies(Kind.PLAN_STEP)) <= 2 * STEPS + 1
    assert answered.seconds < TRIPPED
    assert system.gateway.alive


@at("F-29", "conductor and workers cannot be reached, then can", "failed at once, then answered again, not degraded")
def test_when_everything_is_away_runs_end_and_when_it_is_back_they_succeed(system: Scene) -> None:
    tier = f"baton-{len(PLIGHTS)}"
    with system.to_stub.in_mode(Refuse()):
        answered = ask(system.gateway, tier, timeout=60)
        assert (answered.status >= 500, bool(answered.code)) == (True, True)
        assert answered.seconds < SECONDS
    until = time.monotonic() + 30
    again = ask(system.gateway, tier, timeout=60)
    while (again.status, again.document.get("baton", {}).get("degraded")) != (200, False):
        assert time.monotonic() < until, again
        again = ask(system.gateway, tier, timeout=60)
    assert settle(system) == []


def bomb(name: str, plan: Any) -> object:
    return case(
        plan,
        family=BOMBS,
        place=f"caller's plan {name}",
        expectation="400 before anything is admitted",
        ci="thousand" in name,
        name=name,
    )


@pytest.mark.parametrize(
    "plan",
    [
        bomb("of ten thousand steps", {"steps": [step("alpha")] * 10_000}),
        bomb("of steps that see each other", {"steps": [step("alpha", (1,)), step("beta", (0,))]}),
        bomb("of a step that sees itself", {"steps": [step("alpha", (0,))]}),
        bomb("of a step that sees what is not there", {"steps": [step("alpha", (-1,))]}),
        bomb("that names its conductor as a worker", {"steps": [step("planner-0")]}),
    ],
)
def test_a_bomb_from_a_caller_is_refused(system: Scene, plan: Any) -> None:
    answered = ask(system.gateway, f"baton-{len(PLIGHTS)}", extra_body={"baton": {"plan": plan}})
    assert (answered.status, bool(answered.code)) == (400, True), answered
    assert settle(system) == []
    assert accounts(system.database) == []
    assert not any(system.stub.requests(name) for name in WORKERS)
