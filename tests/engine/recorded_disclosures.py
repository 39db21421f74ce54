"""Random runs over a provider that records what it receives, compared with the ledger of disclosures.

`python -m tests.engine.recorded_disclosures` plays a thousand runs; a test plays some dozens. The runs have every
topology, failures with retries and replacements, several rounds, workflows inside steps, and tools. What a recipient
saw is taken from the bytes that arrived: the caller's words, the texts of steps, and results of tools are all unique.
"""

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import httpx

from app.core.run.events import Kind, StepDone, facts
from app.core.run.kinds import ENDED
from app.process.wiring import Runtime
from app.store.protocol import Disclosure, DisclosureQuery
from tests.harness.in_process import await_ended_row, client_of, events, pool_text, running_service
from tests.stubs import Fail, ProviderStub, Reply, ToolCall
from tests.stubs.record import ReceivedRequest
from tests.stubs.script import Behaviour

TIERS = ("baton-mini", "baton-ultra", "baton-ultra", "baton-deep", "baton-nested", "baton-nested", "baton-again")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TURNS = 4
Sight = tuple[str, bool, frozenset[str], bool]
"""A recipient, whether it saw the caller's words, the texts of steps that it saw, and whether it saw tools' results."""


class Models:
    """The models behind the provider: their words are never said twice, and they fail now and then."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._said = 0

    def act(self, received: ReceivedRequest) -> Behaviour:
        """Return what comes of one request."""
        if received.model == "planner":
            return Reply(chunks=(self._plan(),)) if self._chance.random() < 0.95 else Fail(status=503)
        draw = self._chance.random()
        if draw < 0.12:
            return Fail(status=503)
        if draw < 0.17:
            return Reply(chunks=())
        body = received.json
        if body.get("tools") and draw < 0.6 and body["messages"][-1]["role"] != "tool":
            return Reply(chunks=(), tool_calls=(ToolCall("look"),), finish="tool")
        self._said += 1
        return Reply(chunks=(f"words-{self._said}.",))

    def _plan(self) -> str:
        steps = []
        for place in range(self._chance.randint(0 if self._chance.random() < 0.3 else 1, 4)):
            earlier = [n for n in range(place) if self._chance.random() < 0.5]
            user = ["user"] if self._chance.random() < 0.6 or not place else []
            worker = self._chance.choice((0, 1, 2, 0, 1, 2, 3))
            steps.append({"worker": worker, "subtask": f"Part {place}.", "access": [*user, *earlier]})
        return json.dumps({"steps": steps})


async def play(runtime: Runtime, stub: ProviderStub, runs: int, seed: int) -> list[str]:
    """Play runs one after the other. Returns each difference between the ledger and what was received, in words."""
    chance = random.Random(seed)
    stub.always("*", Models(chance).act)
    differences: list[str] = []
    async with client_of(runtime) as client:
        for number in range(runs):
            stub.requests.clear()
            name = await _one(client, chance, number)
            await await_ended_row(runtime.context.store, name)
            differences += await _differences(runtime, stub.requests, name, number)
    return differences


async def _one(client: httpx.AsyncClient, chance: random.Random, number: int) -> str:
    """Ask once, and answer its tool calls. Returns the id of the run."""
    messages: list[dict[str, object]] = [{"role": "user", "content": f"asked-{number}."}]
    more = {"tools": [TOOL]} if chance.random() < 0.4 else {}
    body = {"model": chance.choice(TIERS), "messages": messages, **more}
    for turn in range(TURNS):
        reply = await client.post("/v1/chat/completions", json=body)
        name = reply.headers["x-baton-run"]
        message = reply.json()["choices"][0]["message"] if reply.status_code == 200 else {}
        if not message.get("tool_calls"):
            return name
        results = [f"result-{number}." for _ in message["tool_calls"]] if turn < TURNS - 1 else []
        if not results:
            break
        calls = zip(message["tool_calls"], results, strict=True)
        messages += [message, *({"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in calls)]
    assert (await client.post(f"/v1/runs/{name}/cancel", json={})).json()["state"] in ENDED
    return name


async def _differences(runtime: Runtime, requests: Iterable[ReceivedRequest], run: str, number: int) -> list[str]:
    done_steps = facts(await events(runtime, run), StepDone)
    refs = {fact.n: fact.output for fact in done_steps if fact.output}
    bodies = await runtime.context.store.contents(run, sorted(set(refs.values())))
    texts = {n: bodies[ref].decode() for n, ref in refs.items()}
    received = Counter(_read_sight(request, set(texts.values()), number) for request in requests)
    rows = await runtime.context.store.disclosures(DisclosureQuery(runs=(run,), limit=1_000))
    written = Counter(_read_recorded_sight(row, texts) for row in rows)
    calls = [event for event in await events(runtime, run) if event.kind is Kind.CALL_FINISHED]
    outcomes = {event.body["call"]: event.body["outcome"] for event in calls}
    words = [f"{run}: received and not written: {element}" for element in (received - written).elements()]
    words += [f"{run}: written and not received: {element}" for element in (written - received).elements()]
    words += [f"{run}: {row.call} ended as {row.outcome}" for row in rows if row.outcome != outcomes.get(row.call)]
    return words


def _read_sight(request: ReceivedRequest, texts: set[str], number: int) -> Sight:
    body = request.body.decode()
    visible_texts = frozenset(text for text in texts if text in body)
    return request.model, f"asked-{number}." in body, visible_texts, f"result-{number}." in body


def _read_recorded_sight(row: Disclosure, texts: dict[int, str]) -> Sight:
    return row.recipient, row.saw_user, frozenset(texts[n] for n in row.saw_steps), row.saw_results


async def play_on_new_service(folder: Path, runs: int, seed: int) -> list[str]:
    """Play runs on a service of their own."""
    async with ProviderStub() as stub, running_service(folder, pool_text(stub)) as runtime:
        return await play(runtime, stub, runs, seed)


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.recorded_disclosures")
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        differences = asyncio.run(play_on_new_service(Path(name), arguments.runs, arguments.seed))
    print(
        f"{arguments.runs} runs in {time.monotonic() - began:.0f} s; {len(differences)} differences",
        *differences[:20],
        sep="\n  ",
    )
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
