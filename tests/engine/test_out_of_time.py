"""Runs whose caller gave them few seconds, with simulated workers and a clock that waits for nobody."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.cli.runs import run_words
from tests.bench.caps import QUIET, pool_of
from tests.harness.in_process import client_of, running_service
from tests.harness.skipped_time import run_skipping

QUESTION = [{"role": "user", "content": "Explain at length how a bill becomes a law."}]
SLOWER = 300
"""A factor on the pauses of the simulated workers: the pinned one writes first after 6 s, then on every 0.6 s."""
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "f", "schema": {"type": "object", "properties": {"law": {"type": "string"}}}},
}


def reply_out_of_time(folder: Path, work: Callable[[httpx.AsyncClient], Awaitable[Any]], pool: str = "") -> Any:
    """The result of work with a client of a service whose workers are slow."""

    async def play() -> Any:
        async with running_service(folder, pool or pool_of(SLOWER), QUIET) as runtime, client_of(runtime) as client:
            return await work(client)

    return run_skipping(play())


def ask_within(seconds: float | None, **more: Any) -> Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]:
    baton: dict[str, Any] = {"pool": {"pin": "rehearsal-scribe"}}
    if seconds is not None:
        baton["budget"] = {"seconds": seconds}

    def ask(client: httpx.AsyncClient) -> Awaitable[httpx.Response]:
        body = {"model": "baton-mini", "messages": QUESTION, "baton": baton, **more}
        return client.post("/v1/chat/completions", json=body)

    return ask


@pytest.mark.long
def test_what_was_written_by_the_end_of_the_callers_time_is_the_answer(tmp_path: Path) -> None:
    async def work(client: httpx.AsyncClient) -> Any:
        reply = await ask_within(8)(client)
        whole = await ask_within(100)(client)
        path = f"/v1/runs/{reply.headers['x-baton-run']}"
        explanation = (await client.get(f"{path}/explain")).json()
        return reply, whole, (await client.get(path)).json(), explanation

    reply, whole, run, explanation = reply_out_of_time(tmp_path, work)
    value, text = reply.json(), whole.json()["choices"][0]["message"]["content"]
    answer_text = value["choices"][0]["message"]["content"]
    assert (reply.status_code, value["choices"][0]["finish_reason"]) == (200, "length")
    assert value["baton"]["degraded"]
    assert answer_text
    assert text.startswith(answer_text)
    assert len(answer_text) < len(text)
    [attempt] = run["steps"][0]["attempts"]
    assert (attempt["outcome"], attempt["out_of_time"], attempt["usage"]["estimated"]) == ("ok", True, True)
    assert run["ended_at"] - run["created_at"] <= 8
    assert whole.json()["baton"]["degraded"] is False
    for words in (explanation["text"], run_words.why(run)[-1]):
        assert "a text was cut off because the time was over" in words


def test_a_stream_ends_with_what_was_written_in_time(tmp_path: Path) -> None:
    reply = reply_out_of_time(tmp_path, ask_within(8, stream=True))
    *_, last, done_line = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert (json.loads(last)["choices"][0]["finish_reason"], done_line) == ("length", "[DONE]")


def test_a_run_of_which_nothing_was_written_in_time_is_expired(tmp_path: Path) -> None:
    reply = reply_out_of_time(tmp_path, ask_within(4))
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "run_expired")


def test_nothing_that_has_a_form_is_cut_off(tmp_path: Path) -> None:
    reply = reply_out_of_time(tmp_path, ask_within(8, response_format=FORM))
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "run_expired")


def test_the_time_of_a_tier_is_no_budget(tmp_path: Path) -> None:
    """Callers who gave no time get the error that they always got."""
    pool = pool_of(SLOWER).replace("seconds = 60", "seconds = 8", 1)
    assert pool != pool_of(SLOWER)
    reply = reply_out_of_time(tmp_path, ask_within(None), pool)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "run_expired")
    assert "time limit of 8 seconds" in reply.json()["error"]["message"]
