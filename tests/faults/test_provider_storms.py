"""F-21 and F-22: a provider limits us, or fails altogether: few attempts beyond the first, and answers where there are
other workers that may give them.

Each case has workers and a tier of its own, because what a process has learnt of a worker outlives a case.
"""

import time
from collections.abc import Callable, Iterator

import pytest
from msgspec import Struct

from app.core.pool.breaker import FREE_RETRIES, RETRY_SHARE
from app.core.run.events import Kind
from tests.faults.accounts import accounts, settle
from tests.faults.network_proxy import NetworkProxy
from tests.faults.points import case
from tests.faults.scene import Scene, ask, over, scene
from tests.stubs import Drop, Fail
from tests.stubs.control import StubControl
from tests.stubs.script import Behaviour

ASKED, AT_ONCE = 36, 12
OPENS = 10
"""Calls after which nobody calls a worker any more that always fails."""
PRICE = "price = { input = 1, output = 2 }\n"
LABELS = {"baton": {"labels": ["phi"]}}
Record = Callable[[str, object], None]


class Storm(Struct, frozen=True):
    """A fault that a worker answers to everything, and whether another worker may take its place."""

    name: str
    family: str
    act: Behaviour
    spare: bool
    ci: bool = False

    @property
    def place(self) -> str:
        """Return the name of the injection point."""
        others = "another worker is free" if self.spare else "no other worker may"
        return f"provider answers {self.name} to everything, {others}"


LIMITS, OUTAGES = "F-21", "F-22"
STORMS = (
    *(
        Storm(name, LIMITS, act, spare, ci)
        for spare in (True, False)
        for name, act, ci in (
            ("429", Fail(status=429), False),
            ("429 with Retry-After 1 s", Fail(status=429, retry_after=1.0), spare),
            ("429 with Retry-After 1 h", Fail(status=429, retry_after=3_600), False),
            ("429 with a date", Fail(status=429, retry_after=2.0, as_date=True), False),
        )
    ),
    *(
        Storm(name, OUTAGES, act, spare, ci)
        for spare in (True, False)
        for name, act, ci in (
            ("500", Fail(status=500), False),
            ("502 and a web page", Fail(status=502, html=True), False),
            ("503 with Retry-After", Fail(status=503, retry_after=1.0), spare),
            ("529", Fail(status=529), False),
            ("a reset", Drop(), False),
        )
    ),
)


def pools(stub: StubControl, to_stub: NetworkProxy) -> str:
    """Return a tier for each storm: the bad worker, perhaps a good one, and one that must never see what is asked."""
    parts = [f'[providers.stub]\nformat = "openai"\nbase_url = "{over(to_stub, stub)[0]}"\nkey = "STUB_KEY"\n']
    for n, storm in enumerate(STORMS):
        cleared = [f"bad-{n}", *([f"good-{n}"] if storm.spare else [])]
        for name in (*cleared, f"uncleared-{n}"):
            clearance = 'clearance = ["phi"]\n' if name in cleared else ""
            parts.append(f'[workers.{name}]\nprovider = "stub"\nmodel = "{name}"\n{clearance}{PRICE}')
        pool = ", ".join(f'"{name}"' for name in (*cleared, f"uncleared-{n}"))
        parts.append(
            f"[tiers.baton-{n}]\npool = [{pool}]\nlimits = {{ seconds = 20 }}\n"
            f'conductor = {{ kind = "fixed", shape = "single", workers = ["bad-{n}"] }}\n'
        )
    return "".join(parts)


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("storms"), dispatchers=1, pools=pools) as new_scene:
        yield new_scene


def storm(number: int) -> object:
    storm_case = STORMS[number]
    ends = "the other one answers" if storm_case.spare else "each run ends, as failed"
    few = f"at most {1 + RETRY_SHARE} attempts a call"
    if storm_case.family == OUTAGES and storm_case.spare:
        few = f"left alone after {OPENS} calls and those under way"
    expectation = f"{few}; {ends}; none beyond its clearance"
    return case(
        number,
        family=storm_case.family,
        place=storm_case.place,
        expectation=expectation,
        ci=storm_case.ci,
        name=storm_case.place,
    )


@pytest.mark.parametrize("number", [storm(number) for number in range(len(STORMS))])
def test_a_storm_is_weathered(system: Scene, number: int, record_property: Record) -> None:
    storm_case, bad, good = STORMS[number], f"bad-{number}", f"good-{number}"
    system.stub.always(bad, storm_case.act)
    began = time.monotonic()
    answers = []
    for _ in range(ASKED // AT_ONCE):
        calls = [
            system.aside(ask, system.gateway, f"baton-{number}", timeout=60, extra_body=LABELS) for _ in range(AT_ONCE)
        ]
        answers += [call.result(90) for call in calls]
    seconds = time.monotonic() - began
    assert settle(system) == []
    received = {name: len(system.stub.requests(name)) for name in (bad, good, f"uncleared-{number}")}
    record_property("measured", f"{received[bad]} calls of the bad, {received[good]} of the good, {seconds:.1f} s")
    workers = 2 if storm_case.spare else 1
    assert sum(received.values()) <= (1 + RETRY_SHARE) * ASKED + workers * FREE_RETRIES + AT_ONCE * (workers - 1)
    assert received[f"uncleared-{number}"] == 0
    ours = accounts(system.database)
    if storm_case.spare:
        assert {answer.status for answer in answers} == {200}
        assert received[good] >= ASKED
        rounds = max(1, int(seconds))  # a probe now and then is what brings it back
        assert received[bad] <= OPENS + AT_ONCE + rounds
    else:
        assert {run.row["state"] for run in ours} == {"failed"}
        assert all(answer.status >= 400 and answer.code for answer in answers)
    for run in ours:
        assert {body["worker"] for body in run.bodies(Kind.CALL_INTENDED)} <= {bad, good}
    assert system.dispatchers[0].alive
