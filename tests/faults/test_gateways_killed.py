"""F-07: every gateway is killed in turn while callers of every kind go on asking.

No run is lost, and whoever asks again with an `Idempotency-Key` gets the same from any other gateway.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.fleet import PRESENT, fleet
from tests.faults.mixed_load import AnsweredRequest, Client, run_mixed_load
from tests.faults.points import at

pytestmark = pytest.mark.timeout(300)
GATEWAYS = 3


@at("F-07", "every gateway killed in turn under load", "0 lost; the same answer from any other gateway", ci=True)
def test_no_run_is_lost_and_every_answer_is_the_same_elsewhere(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with fleet(tmp_path) as scene:
        PRESENT.migrate(tmp_path, scene.environ)
        scene.add(PRESENT, "gateway", GATEWAYS)
        scene.add(PRESENT, "dispatcher", 2)
        scene.wait()
        with run_mixed_load(scene.urls) as load:
            load.go_on()
            for gateway in scene.processes["gateway"]:
                load.wait_for_a_request_at(gateway.url)
                gateway.kill()
                load.go_on()
                gateway.start()
                scene.wait()
        load.check()
        runs = scene.runs()
        states = [run["state"] for run in runs]
        assert states == ["succeeded"] * load.conversations, "one run for each conversation"
        for gateway in scene.processes["gateway"]:
            again = Client([gateway.url])
            differing = [answer for answer in load.answers if ask_again(again, answer) != answer.repeatable_part]
            assert differing == []
        assert scene.runs() == runs, "nothing was begun anew"
        assert scene.violations() == []
    cut_off = load.resent["RemoteProtocolError"] + load.resent["ReadError"]
    assert cut_off > 0, "requests were under way at the gateways that were killed"
    measured = f"{len(runs)} runs, {cut_off} replies cut off, slowest {load.slowest:.1f} s"
    record_property("measured", measured)


def ask_again(client: Client, answer: AnsweredRequest) -> object:
    """Return the reply to the same request with the same key."""
    client.post(answer.path, answer.body, answer.key)
    return client.answers[-1].repeatable_part
