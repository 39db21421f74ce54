"""`make run` on a fresh machine, and what a newcomer then does: no key, no file, no database, no setting.

One process over an empty data folder, asked by the official client; each answer is explained by `baton runs show`.
`tests/deploy/test_readme.py` has such a start in an interpreter of its own.
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from openai import AuthenticationError

from app.cli.runs import run_words
from app.process.serve import listener_url
from tests.conformance.test_rehearsal import EASY
from tests.harness.processes import Caller, Process, environment, open_caller, run_command, running_process
from tests.harness.waiting import wait_until

PRINTED: Final = re.compile(r"export BATON_API_KEY=(bt_\S+)")
TIERS: Final = ("baton-mini", "baton-ultra")


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An empty data folder, and workers that answer at once."""
    return environment(tmp_path_factory.mktemp("baton"), BATON_REHEARSAL_DELAY="0")


@pytest.fixture(scope="module")
def service(environ: dict[str, str]) -> Iterator[Process]:
    """The whole service in one process."""
    with running_process("serve", Path(environ["BATON_DATA_DIR"]).parent, environ) as process:
        yield process


@pytest.fixture(scope="module")
def key(service: Process) -> str:
    """The key that the first start has printed."""
    match = PRINTED.search(service.output)
    assert match is not None, service.output
    return match[1]


@pytest.fixture
def caller(service: Process, key: str) -> Iterator[Caller]:
    """Somebody who has pasted what was printed."""
    with open_caller(service.url, key) as new_caller:
        yield new_caller


def ask(caller: Caller, tier: str, question: str, streams: bool) -> tuple[str, dict[str, Any]]:
    return caller.ask_streaming(tier, question) if streams else caller.ask_whole(tier, question)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.long
def test_every_rehearsal_question_is_answered_rightly(caller: Caller, tier: str, streams: bool) -> None:
    for question, answer in EASY:
        answer_text, reply = ask(caller, tier, question, streams)
        assert answer in answer_text, question
        assert reply["baton"]["rehearsal"] is True
        assert reply["baton"]["degraded"] is False
        usage = reply["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0


def test_a_stream_comes_in_pieces(caller: Caller) -> None:
    _, reply = caller.ask_streaming("baton-ultra", "What are the prime factors of 84?")
    assert reply["deltas"] > 1


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_run_is_explained_on_the_command_line(
    caller: Caller, service: Process, environ: dict[str, str], tier: str, streams: bool
) -> None:
    _, reply = ask(caller, tier, "Solve for x: 2(x - 3) = 4x + 1", streams)
    output = run_command(service.folder, environ, "runs", "show", reply["baton"]["run"])
    assert output.returncode == 0, output.stderr
    assert "succeeded" in output.stdout
    assert (len(reply["baton"]["steps"]) > 1) is (tier == "baton-ultra")
    for step in reply["baton"]["steps"]:
        assert step["worker"] in output.stdout
        assert f"sees: {run_words.sees(step['access'])}" in output.stdout


@pytest.mark.long
def test_the_first_key_is_shown_once_and_restarts_keep_it_and_the_runs(
    service: Process, environ: dict[str, str], key: str
) -> None:
    assert key not in service.log
    with open_caller(service.url, key) as caller:
        _, reply = caller.ask_whole("baton-mini", "2+2")
        before = caller.read("/v1/runs")["data"]
    assert service.stop() == 0
    service.start()
    assert "bt_" not in service.output
    with open_caller(service.url, key) as caller:
        assert caller.read("/v1/runs")["data"] == before
        assert caller.run(reply["baton"]["run"])["state"] == "succeeded"
        assert "4" in caller.ask_whole("baton-ultra", "2+2")[0]
    for path in Path(environ["BATON_DATA_DIR"]).iterdir():
        assert key.encode() not in path.read_bytes(), f"{path.name} holds the key itself"


@pytest.mark.long
def test_the_log_of_changes_says_since_when_texts_are_kept_for_how_long(tmp_path: Path) -> None:
    environ = environment(tmp_path / "data")
    listing = ("audit", "changes", "--action", "retention.set")

    def is_logged(words: str) -> bool:
        return words in run_command(tmp_path, environ, *listing).stdout

    month = {"BATON_RETENTION_CONTENT": "30"}
    for days, words in (({}, "erased: never"), (month, "was never, is 30"), (month, "was never, is 30")):
        with running_process("serve", tmp_path, environ | days):
            wait_until(partial(is_logged, words), what="the engine has logged its settings")
    logged = json.loads(run_command(tmp_path, environ, *listing, "--json").stdout)
    assert [entry["after"]["content"] for entry in logged] == ["30", "never"], "the newest first"
    assert logged[0]["at"] > logged[1]["at"]
    assert run_command(tmp_path, environ, "audit", "check").returncode == 0


@pytest.mark.long
def test_a_pepper_that_voids_every_key_is_told_upon_the_signal_that_brings_it(tmp_path: Path) -> None:
    """As a rotation does that forgets the old line: the log had nothing but 401s."""
    with running_process("serve", tmp_path, environment(tmp_path)) as process:
        (tmp_path / "data" / "pepper").write_text("x" * 32)
        os.kill(process.pid, signal.SIGHUP)
        wait_until(lambda: "No API key is accepted" in process.log, what="the process has compared the pepper")


def test_a_lost_pepper_is_told_at_the_start_and_by_the_doctor(
    service: Process, environ: dict[str, str], key: str
) -> None:
    """The last test of this file: the key is void after it."""
    assert "No API key is accepted" not in service.log
    assert "\nok    keys: " in run_command(service.folder, environ, "doctor").stdout
    assert service.stop() == 0
    (Path(environ["BATON_DATA_DIR"]) / "pepper").unlink()
    service.start()
    wait_until(lambda: "No API key is accepted" in service.log, what="the process has compared the pepper")
    with open_caller(service.url, key) as caller, pytest.raises(AuthenticationError):
        caller.ask_whole("baton-mini", "2+2")
    checked = run_command(service.folder, environ, "doctor")
    assert checked.returncode == 1
    assert "\nfail  keys: all are void" in checked.stdout


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://127.0.0.1:80"), ("::1", "http://[::1]:80")],
)
def test_a_listener_is_announced_at_a_url_that_can_be_called(host: str, url: str) -> None:
    assert listener_url(host, 80) == url
