"""F-31: every process is replaced, one after the other, behind a real reverse proxy and under load.

No caller sees an error of any kind: no refused or broken connection, no 429 or 503, no cut stream. `BATON_TEST_ROLLS`
says how often each process is replaced, and `BATON_TEST_ROLL_SECONDS` how long the load goes on at least after each:

    BATON_TEST_ROLLS=3 BATON_TEST_ROLL_SECONDS=50 pytest -m faults_suite tests/faults/test_rolling.py
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.fleet import PRESENT, VERBS, fleet
from tests.faults.mixed_load import mixed_load
from tests.faults.points import at
from tests.harness import servers

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(servers.nginx_binary() is None, reason="nginx is not installed (Debian's package nginx-light)"),
]
COUNT = 2
"""Processes of each role."""
ROLLS = int(os.environ.get("BATON_TEST_ROLLS", "1"))
SECONDS = float(os.environ.get("BATON_TEST_ROLL_SECONDS", "0"))
DRAIN_SECONDS = "1"


@at("F-31", "every process replaced behind nginx under load", "no error of any kind for any caller", ci=True)
def test_a_rolling_update_drops_nothing(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    with fleet(tmp_path) as scene:
        PRESENT.migrate(tmp_path, scene.environ)
        scene.environ = {**scene.environ, "BATON_DRAIN_SECONDS": DRAIN_SECONDS}
        for verb in VERBS:
            scene.add(PRESENT, verb, COUNT)
        scene.wait()
        ports = [gateway.port for gateway in scene.processes["gateway"]]
        with servers.nginx(ports) as proxy, mixed_load([proxy.url]) as load:
            load.go_on()
            for _ in range(ROLLS):
                PRESENT.migrate(tmp_path, scene.environ)
                for verb in VERBS:
                    for place in range(COUNT):
                        began = time.monotonic()
                        scene.replace(PRESENT, verb, place)
                        load.go_on()
                        while time.monotonic() - began < SECONDS:
                            load.go_on()
        load.check()
        assert dict(load.broken) == {}, "no request had to be sent again"
        states = [run["state"] for run in scene.runs()]
        assert states == ["succeeded"] * load.conversations, "one run for each conversation"
        assert scene.violations() == []
    record_property("measured", f"{load.conversations} conversations, the slowest took {load.slowest:.1f} s")
