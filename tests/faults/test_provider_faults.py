"""F-23 to F-25: a provider hangs, breaks off or talks nonsense; its step fails, is done by another, and nobody suffers.

Each case has two workers of its own, `bad` and `good`, because what a process has learnt of a worker outlives a case.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec import Struct

from app.core.run.events import Kind
from tests.faults.accounts import Account, account, settle
from tests.faults.network_proxy import NetworkProxy
from tests.faults.points import case
from tests.faults.scene import Scene, ask, over, probe, scene
from tests.stubs import (
    Drop,
    DuplicateFinish,
    Garbage,
    Hang,
    HugeLine,
    Raw,
    Reply,
    Reset,
    Stall,
    StreamError,
    Trickle,
    Truncate,
    WrongSchema,
)
from tests.stubs.control import StubControl
from tests.stubs.script import Behaviour

FIRST, GAP, TOTAL = 1.5, 1.0, 5.0
"""Seconds that these workers may take to begin, between two reads, and for all of a call."""
Record = Callable[[str, object], None]
WORDS = ("One ", "two ", "three ", "four.")


class Fault(Struct, frozen=True):
    """The behaviour of the bad worker, and the outcomes of its attempts."""

    name: str
    family: str
    act: Behaviour
    outcome: str = "error"
    """Of its attempts; `ok`: there is nothing wrong with it that matters."""
    begins: bool = False
    """Whether some of a streamed answer comes before the fault: then nobody else may answer in its stead."""
    seconds: float = 2.0
    """How long one attempt takes at most."""
    whole: bool = True
    """Whether the fault also shows in a reply that is not streamed."""
    ci: bool = False


def usage(**figures: Any) -> Reply:
    return Reply(chunks=WORDS, raw_usage={"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19, **figures})


def raw(delta: str) -> Raw:
    """Return a stream of one chunk with this JSON text as its content."""
    head = '{"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    choice = f'[{{"index":0,"delta":{{"content":{delta}}},"finish_reason":"stop"}}]'
    return Raw(body=f"data: {head}{choice}}}\n\ndata: [DONE]\n\n")


BUSY = 15.0
"""Seconds that a busy machine may take for an answer on top of what the fault costs; the run's own limit is 40."""
HANGS, BREAKS, NONSENSE = "F-23", "F-24", "F-25"
FAULTS = (
    Fault("accepts and hangs", HANGS, Hang(), seconds=TOTAL + 1, ci=True),
    Fault("begins a reply and says nothing", HANGS, Reply(chunks=WORDS, first_delay=60), seconds=TOTAL + 1),
    Fault("stalls in the middle", HANGS, Reply(chunks=WORDS, fault=Stall(after=2)), begins=True, seconds=TOTAL + 1),
    Fault("drips a byte every 10 s", HANGS, Reply(chunks=WORDS, trickle=Trickle(1, 10)), seconds=TOTAL + 1),
    Fault("drips a byte every 0.5 s", HANGS, Reply(chunks=WORDS, trickle=Trickle(1, 0.5)), seconds=TOTAL + 1, ci=True),
    Fault("never ends", HANGS, Reply(endless=True, gap=0.01), begins=True, whole=False, seconds=TOTAL + 1, ci=True),
    Fault("never ends, at full speed", HANGS, Reply(endless=True), begins=True, whole=False, seconds=TOTAL + 1),
    Fault("resets before any header", BREAKS, Drop(), ci=True),
    Fault("ends without its marker", BREAKS, Reply(chunks=WORDS, fault=Truncate(after=2)), "truncated", True, ci=True),
    Fault("closes in the middle", BREAKS, Reply(chunks=WORDS, fault=Truncate(2, clean=False)), "truncated", True),
    Fault("resets in the middle of a chunk", BREAKS, Reply(chunks=WORDS, fault=Reset(2)), "truncated", True, ci=True),
    Fault("ends before its last frames", BREAKS, Reply(chunks=WORDS, fault=Truncate("close")), "truncated", True),
    Fault("errs inside a 200 stream", BREAKS, Reply(chunks=WORDS, fault=StreamError(2)), begins=True, ci=True),
    Fault("errs at the head of a 200 stream", BREAKS, Reply(chunks=WORDS, fault=StreamError(0))),
    Fault("sends bad JSON", NONSENSE, Reply(chunks=WORDS, fault=Garbage(1)), begins=True, ci=True),
    Fault("sends JSON of a wrong shape", NONSENSE, Reply(chunks=WORDS, fault=WrongSchema(1)), begins=True),
    Fault("sends a line of 50 MB", NONSENSE, Reply(chunks=WORDS, fault=HugeLine(1)), begins=True, seconds=10, ci=True),
    Fault("sends a web page", NONSENSE, Raw(body="<html>no</html>", content_type="text/html")),
    Fault("sends nothing", NONSENSE, Raw(body=""), "truncated"),
    Fault("says unpaired surrogates", NONSENSE, raw('"\\ud800 and \\udfff"'), "ok", ci=True),
    Fault("says NUL", NONSENSE, raw('"a\\u0000b"'), "ok", ci=True),
    Fault("nests a thousand levels deep", NONSENSE, raw("[" * 1000 + "]" * 1000)),
    Fault("says 1e400", NONSENSE, raw("1e400")),
    Fault("reports no usage", NONSENSE, Reply(chunks=WORDS, usage=None), "ok"),
    Fault("reports negative usage", NONSENSE, usage(prompt_tokens=-5, completion_tokens=-7), "ok", ci=True),
    Fault("reports huge usage", NONSENSE, usage(prompt_tokens=10**30, completion_tokens=10**30), "ok", ci=True),
    Fault("reports usage that is no number", NONSENSE, usage(prompt_tokens="many", completion_tokens=None), "ok"),
    Fault("calls itself by another name", NONSENSE, Reply(chunks=WORDS, model="something-else"), "ok"),
    Fault("finishes twice", NONSENSE, Reply(chunks=WORDS, fault=DuplicateFinish()), "ok", ci=True),
    Fault("finishes for no known reason", NONSENSE, Reply(chunks=WORDS, finish="because"), "ok"),
)
PLACES = tuple((fault, streams) for fault in FAULTS for streams in (False, True) if streams or fault.whole)


def pools(stub: StubControl, to_stub: NetworkProxy) -> str:
    """Two workers for each case."""
    workers = "".join(
        f'[workers.{name}-{n}]\nprovider = "stub"\nmodel = "{name}-{n}"\nprice = {{ input = 1, output = 2 }}\n'
        for n in range(len(PLACES) + 1)
        for name in ("bad", "good")
    )
    return f"""
[providers.stub]
format = "openai"
base_url = "{over(to_stub, stub)[0]}"
key = "STUB_KEY"
deadlines = {{ first = {FIRST}, gap = {GAP}, total = {TOTAL} }}
{workers}
[tiers.baton-mini]
pool = "all"
conductor = {{ kind = "fixed", shape = "single", workers = ["good-0"] }}
limits = {{ seconds = 40 }}
"""


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("providers"), dispatchers=1, pools=pools) as new_scene:
        yield new_scene


def place(number: int) -> object:
    fault, streams = PLACES[number]
    how = "streamed" if streams else "whole"
    if fault.outcome == "ok":
        expectation = "contained, and settled by sane figures"
    elif fault.begins and streams:
        expectation = f"{fault.outcome}; never mixed with another's answer"
    else:
        expectation = f"{fault.outcome}, then answered by another worker"
    name = f"provider {fault.name}, {how}"
    ci = fault.ci and streams
    return case(number, family=fault.family, place=name, expectation=expectation, ci=ci, name=name)


@pytest.mark.parametrize("number", [place(number) for number in range(len(PLACES))])
def test_a_provider_that_misbehaves_is_contained(system: Scene, number: int, record_property: Record) -> None:
    fault, streams = PLACES[number]
    bad, good = f"bad-{number + 1}", f"good-{number + 1}"
    system.stub.always(bad, fault.act)
    plan = {"steps": [{"worker": bad, "subtask": "Answer.", "access": ["user"]}]}
    extension = {"plan": plan, "pool": {"allow": [bad, good]}}
    asking = system.aside(ask, system.gateway, "baton-mini", streams=streams, extra_body={"baton": extension})
    control = ask(system.gateway, "baton-mini")
    assert (control.status, control.text) == (200, "Hello there."), "others go on as if nothing had happened"
    answered = asking.result(60)
    assert settle(system) == []
    run = account(system, answered.run or system.latest_of(bad))
    outcomes = run.outcomes()[0]
    record_property("measured", f"{', '.join(outcomes)} in {answered.seconds:.1f} s")
    if fault.outcome == "ok":
        assert_contained(fault, run)
    elif fault.begins and streams:
        assert (answered.status, bool(answered.code)) == (200, True), "an error event, and no end of the stream"
        assert outcomes == [fault.outcome]
    else:
        assert (answered.status, answered.text, answered.code) == (200, "Hello there.", "")
        assert outcomes[-1] == "ok"
        assert set(outcomes[:-1]) == {fault.outcome}
        assert len(outcomes) <= 3
    tries = [body for body in run.bodies(Kind.CALL_INTENDED) if body["worker"] == bad]
    assert answered.seconds < len(tries) * fault.seconds + BUSY
    assert system.dispatchers[0].alive
    assert probe(system.gateway, "/readyz") == 200


def assert_contained(fault: Fault, run: Account) -> None:
    """Taken for an answer, with figures that money can be counted with, or refused like any other nonsense."""
    assert run.outcomes()[0][-1] == "ok"
    for body in run.bodies(Kind.CALL_FINISHED):
        figures = body["usage"]
        assert all(0 <= figures[name] < 2**53 for name in ("input", "output", "cached", "reasoning")), figures
        assert 0 <= body["usd"] < 2**53
    if "usage" in fault.name:
        assert run.bodies(Kind.CALL_FINISHED)[-1]["usage"]["estimated"] or run.outcomes()[0][0] != "ok"
