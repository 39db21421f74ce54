"""F-31: every process is replaced, one after the other, behind a real reverse proxy and under load, with a migration.

The processes begin with the code and the schema of a commit that is several migrations older, but drains as the present
one does. They are rolled to the present code, and back, and so on. The schema is migrated before the first roll and
stays. No caller sees an error of any kind: no refused or broken connection, no 429 or 503, no cut stream among those
that are shorter than the time which a process gets to stop. Longer streams are cut, and resumed by `Last-Event-ID`.

`BATON_TEST_ROLLS` says how often each process is replaced, and `BATON_TEST_ROLL_SECONDS` how long the load goes on at
least after each; the long streams run where that is not 0:

    BATON_TEST_ROLLS=3 BATON_TEST_ROLL_SECONDS=50 pytest -m faults_suite tests/faults/test_rolling.py
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.fleet import PRESENT, VERBS, Fleet, Release, fleet, unpack_release
from tests.faults.mixed_load import run_mixed_load
from tests.faults.points import at
from tests.harness import servers
from tests.harness.processes import KEY, run_command, user_message
from tests.stubs import Reply

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(servers.nginx_binary() is None, reason="nginx is not installed (Debian's package nginx-light)"),
]
BEFORE = "197aa6a3e801bc39242a55fcf18f925a3e2da24f"
"""The latest commit with the schema of revision 0018. Its gateways answer requests that come over open connections as
they stop, which those before 7327667a did not always, so that a proxy gave a 502 now and then."""
COUNT = 2
"""Processes of each role."""
ROLLS = int(os.environ.get("BATON_TEST_ROLLS", "1"))
SECONDS = float(os.environ.get("BATON_TEST_ROLL_SECONDS", "0"))
DRAIN_SECONDS = "4"
"""Longer than nginx takes to use a gateway again that it has found closed: between one and two seconds until it tries,
since its clock has whole seconds, and then the time of the request that it tries with. The other gateway has to serve
meanwhile, or there is none."""
LONG = tuple(f"word{number} " for number in range(200))
LONG_GAP = 0.2
"""Seconds between two words of a long stream, which takes longer than the 26 s that a gateway gets to stop."""
PATIENT = """
[workers.slow]
provider = "stub"
model = "slow"
price = { input = 1, output = 2 }
pooled = false
[tiers.patient]
pool = ["slow"]
conductor = { kind = "fixed", shape = "single", workers = ["slow"] }
limits = { seconds = 600 }
"""


@dataclass(slots=True)
class LongStreams:
    """Callers who ask for one long stream after another, and resume each that is cut."""

    url: str
    callers: int = 3
    texts: list[str] = field(default_factory=list)
    """The whole text of each stream, as its caller has put it together."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often a stream was resumed, and how often it was begun anew because its attempt was lost (409)."""
    faults: list[str] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        """Ask until told to stop."""
        try:
            turn = 0
            while not self._stopping.is_set():
                self.texts.append(self.one(f"long-{number}-{turn}"))
                turn += 1
        except Exception as problem:  # the test reads it in the main thread
            self.faults.append(f"{number}: {problem!r}")

    def stop(self) -> None:
        """Begin no more streams."""
        self._stopping.set()

    def one(self, key: str) -> str:
        """One stream to its end, however often it is cut; its text."""
        text, last = "", ""
        while True:
            for frame in self._frames(key, last):
                if frame == "409":
                    text, last = "", ""
                    self.counts["begun anew"] += 1
                    break
                number, data = frame.split("\n", 1)
                if data == "[DONE]":
                    return text
                chunk = json.loads(data)
                assert "error" not in chunk, chunk
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                last = number or last
            else:
                self.counts["resumed" if last else "sent again"] += 1

    def _frames(self, key: str, last: str) -> Iterator[str]:
        """The whole events of one connection: the number and the data of each, in two lines; or "409"."""
        body = {"model": "patient", "stream": True, "messages": user_message(f"Question {key}")}
        headers = {"Authorization": f"Bearer {KEY}", "Idempotency-Key": key} | ({"Last-Event-ID": last} if last else {})
        waiting = ""
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False
            ) as reply:
                if reply.status_code == httpx.codes.CONFLICT:
                    yield "409"
                    return
                assert reply.status_code == httpx.codes.OK, (reply.status_code, reply.read())
                for piece in reply.iter_text():
                    *events, waiting = (waiting + piece).split("\n\n")
                    yield from filter(None, map(_event, events))
        except httpx.TransportError:
            return


def _event(text: str) -> str:
    """Return the number and the data of one event; empty for a comment."""
    lines = text.splitlines()
    numbers = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return "\n".join(["".join(numbers), *data]) if data else ""


@contextmanager
def long_streams(url: str) -> Iterator[LongStreams]:
    """Such callers for the length of the block; none where the test is to be short."""
    new_streams = LongStreams(url)
    threads = [
        threading.Thread(target=new_streams.run, args=(number,))
        for number in range(new_streams.callers if SECONDS else 0)
    ]
    for thread in threads:
        thread.start()
    try:
        yield new_streams
    finally:
        new_streams.stop()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The code from before the migrations. It has the present version, so that either takes the other's runs."""
    release = unpack_release(BEFORE, version("baton"), tmp_path_factory.mktemp("before"), unknown=())
    if release is None:
        pytest.skip(f"this clone does not have the commit {BEFORE}")
    return release


@at("F-31", "every process replaced behind nginx under load, with a migration", "no error for any caller", ci=True)
def test_a_rolling_update_drops_nothing(
    tmp_path: Path, earlier: Release, record_property: Callable[[str, object], None]
) -> None:
    with fleet(tmp_path) as scene:
        scene.environ = {**scene.environ, "BATON_DRAIN_SECONDS": DRAIN_SECONDS}
        with (tmp_path / "pool.toml").open("a") as file:
            file.write(PATIENT)
        scene.stub.always("slow", Reply(chunks=LONG, gap=LONG_GAP))
        earlier.migrate(tmp_path, scene.environ)
        assert revision(scene, "current") != revision(scene, "head")
        for verb in VERBS:
            scene.add(earlier, verb, COUNT)
        scene.wait()
        ports = [gateway.port for gateway in scene.processes["gateway"]]
        with servers.nginx(ports) as proxy, run_mixed_load([proxy.url]) as load, long_streams(proxy.url) as long:
            load.go_on()
            PRESENT.migrate(tmp_path, scene.environ)
            assert revision(scene, "current") == revision(scene, "head")
            load.go_on()
            for number in range(ROLLS):
                forth = number % 2 == 0
                for verb in reversed(VERBS) if forth else VERBS:  # engines first, and last on the way back
                    for place in range(COUNT):
                        began = time.monotonic()
                        scene.replace(PRESENT if forth else earlier, verb, place)
                        load.go_on()
                        while time.monotonic() - began < SECONDS:
                            load.go_on()
        load.check()
        assert dict(load.resent) == {}, "no request had to be sent again"
        assert long.faults == []
        assert set(long.texts) <= {"".join(LONG)}, "no word is lost or doubled"
        assert not SECONDS or long.counts["resumed"] > 0
        states = [run["state"] for run in scene.runs()]
        assert states == ["succeeded"] * (load.conversations + len(long.texts)), "one run for each conversation"
        assert scene.violations() == []
    measured = f"{load.conversations} conversations, the slowest took {load.slowest:.1f} s"
    record_property("measured", f"{measured}; {len(long.texts)} long streams, {dict(long.counts)}")


def revision(scene: Fleet, name: str) -> Any:
    """Return a revision of the schema, as `baton migrate --status` shows it."""
    return json.loads(run_command(scene.folder, scene.environ, "migrate", "--status", "--json").stdout)[name]
