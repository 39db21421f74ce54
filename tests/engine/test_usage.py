"""`usage` over many plans: the same streamed and whole, OpenAI's identity inside it, and the journal's sums exactly."""

import json
from collections.abc import Mapping
from random import Random
from typing import Any

import httpx
import pytest

from tests.stubs import Fail, ProviderStub, Reply, plan_reply
from tests.stubs.script import Usage

WORKERS = ("alpha", "beta", "gamma")
FIGURES = ("input", "cached", "output", "reasoning")


def usage(dice: Random) -> Usage | None:
    """Generate a usage as a provider might report it, or none."""
    if dice.random() < 0.2:
        return None
    input_tokens, written = dice.randrange(1, 5_000), dice.randrange(1, 3_000)
    cached = dice.choice((0, input_tokens, dice.randrange(input_tokens + 1)))
    return Usage(
        input=input_tokens, cached=cached, output=written, reasoning=dice.choice((0, dice.randrange(written + 1)))
    )


def steps(dice: Random) -> list[tuple[str, str, list[Any]]]:
    """A plan of 1 to 5 steps; whoever cannot see the caller's words reads an earlier step."""
    planned_steps: list[tuple[str, str, list[Any]]] = []
    for place in range(dice.randrange(1, 6)):
        earlier = [n for n in range(place) if dice.random() < 0.6]
        access = [*(["user"] if dice.random() < 0.7 or not earlier else []), *earlier]
        planned_steps.append((dice.choice(WORKERS), f"Do part {place}.", access))
    return planned_steps


async def ask(client: httpx.AsyncClient, body: Mapping[str, Any], stream: bool) -> tuple[dict[str, Any], str, Any]:
    """The reply's usage, its text and its `baton` field."""
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = await client.post("/v1/chat/completions", json={**body, **more})
    assert reply.status_code == 200, reply.text
    if not stream:
        whole = reply.json()
        return whole["usage"], whole["choices"][0]["message"]["content"], whole["baton"]
    lines = [line.partition("data: ")[2] for line in reply.text.split("\n\n")]
    chunks = [json.loads(line) for line in lines if line.startswith("{")]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return chunks[-1]["usage"], text, chunks[-2]["baton"]


def add_up_usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Visible plus orchestration, where both are told."""
    into, out = usage["prompt_tokens_details"], usage["completion_tokens_details"]
    return {
        "input": usage["prompt_tokens"] + into["orchestration_input_tokens"],
        "cached": into["cached_tokens"] + into["orchestration_input_cached_tokens"],
        "output": usage["completion_tokens"] + out["orchestration_output_tokens"],
    }


@pytest.mark.parametrize("seed", range(12))
async def test_usage_is_the_journals(stub: ProviderStub, client: httpx.AsyncClient, seed: int) -> None:
    dice = Random(seed)
    planned_steps, conducted = steps(dice), dice.random() < 0.5
    alike = Reply(chunks=("Some", " words"), usage=usage(dice))
    for name in WORKERS:  # a conductor is shown them shuffled, so there it must not matter who does what
        stub.always(name, alike if conducted else Reply(chunks=("Words", " of ", name), usage=usage(dice)))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 2 + 2?" * dice.randrange(1, 50)}]}
    if conducted:
        body["model"] = "baton-ultra"
        planned = ((n % 3, text, access) for n, (_, text, access) in enumerate(planned_steps))
        stub.always("planner", plan_reply(*planned, usage=usage(dice)))
    else:
        plan = [{"worker": worker, "subtask": text, "access": access} for worker, text, access in planned_steps]
        body |= {"model": "baton-mini", "baton": {"plan": {"steps": plan}}}
    answers = []
    for stream in (False, True):
        if seed % 3 == 0:
            stub.script(planned_steps[0][0], Fail(status=500))
        answers.append(await ask(client, body, stream))
        await _compare_with_journal(client, *answers[-1])
    (whole, text, baton), (streamed, streamed_text, streamed_baton) = answers
    assert text == streamed_text
    assert whole == streamed
    assert (baton["usage"], baton["cost_usd"]) == (streamed_baton["usage"], streamed_baton["cost_usd"])


async def _compare_with_journal(client: httpx.AsyncClient, usage: dict[str, Any], _text: str, baton: Any) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]
    events = (await client.get(f"/v1/runs/{baton['run']}/events", params={"limit": 1000})).json()["data"]
    calls = [event["body"] for event in events if event["kind"] == "call.finished"]
    assert len(calls) >= len(baton["steps"])
    sums = {}
    for name in FIGURES:
        sums[name] = sum(call["usage"][name] for call in calls)
    assert {name: baton["usage"][name] for name in FIGURES} == sums
    assert baton["usage"]["estimated"] == any(call["usage"]["estimated"] for call in calls)
    assert {name: figure for name, figure in sums.items() if name != "reasoning"} == add_up_usage(usage)
    assert round(baton["cost_usd"] * 1_000_000) == sum(call["usd"] for call in calls)
    answering = next(event["body"]["step"] for event in events if event["kind"] == "run.succeeded")
    answering_calls = {event["body"]["n"]: event["body"]["call"] for event in events if event["kind"] == "step.done"}
    answer = next(call for call in calls if call["call"] == answering_calls[answering])
    assert usage["completion_tokens"] == answer["usage"]["output"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == answer["usage"]["reasoning"]
    run = (await client.get(f"/v1/runs/{baton['run']}")).json()
    assert run["usage"] == usage
    assert run["spent"] == {"usd": baton["cost_usd"], "tokens": sums["input"] + sums["output"]}
    assert run["held"] == {"usd": 0.0, "tokens": 0}
