"""Requests of Anthropic's format at workers of each wire format: what those are sent, and what the caller receives."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.wire_formats import FORMATS
from tests.harness.in_process import calling, running_service
from tests.stubs import KEYS, ProviderStub, Reply

POOL = """
[providers.stub]
format = "{format}"
base_url = "{url}"
key = "STUB_KEY"

[workers.alpha]
provider = "stub"
model = "alpha"
price = {{ input = 1.0, output = 2.0 }}
{worker}
[tiers.baton-mini]
pool = ["alpha"]
conductor = {{ kind = "fixed", shape = "single", workers = ["alpha"] }}
limits = {{ steps = 1, attempts = 1, seconds = 20, output_tokens = 1000 }}
"""
ASKED: dict[str, Any] = {
    "model": "baton-mini",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "What is 2 + 2?"}],
}


@asynccontextmanager
async def serving(stub: ProviderStub, folder: Path, name: str, worker: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service whose only worker speaks that format."""
    spec = FORMATS[name].spec(stub)
    pool = POOL.format(format=spec.format, url=spec.base_url, worker=worker)
    async with running_service(folder, pool, {"STUB_KEY": KEYS[name]}) as opened, calling(opened) as client:
        yield client


STOPPED = Reply(chunks=("Four",), stop_sequence="END")
TOLD = ("stop_sequence", "END")
NOT_TOLD = ("end_turn", None)


@pytest.mark.parametrize(("name", "told"), [("anthropic", TOLD), ("openai", TOLD), ("gemini", NOT_TOLD)])
async def test_the_stop_sequence_that_ended_the_answer_is_named_where_the_worker_names_it(
    stub: ProviderStub, tmp_path: Path, name: str, told: tuple[str, str | None]
) -> None:
    """OpenAI's format as vLLM extends it; of Gemini's no model says which it was."""
    cases = [
        (STOPPED, ["STOP", "END"], told),
        (STOPPED, ["STOP"], NOT_TOLD),
        (Reply(), ["END"], NOT_TOLD),
        (Reply(finish="length"), ["END"], ("max_tokens", None)),
    ]
    async with serving(stub, tmp_path, name) as client:
        for reply, stops, expected in cases:
            stub.always("alpha", reply)
            asked = ASKED | {"stop_sequences": stops}
            key = {"Idempotency-Key": f"{stops}{reply.finish}{reply.stop_sequence}"}
            whole = (await client.post("/v1/messages", json=asked, headers=key)).json()
            again = (await client.post("/v1/messages", json=asked, headers=key)).json()
            streamed = (await client.post("/v1/messages", json=asked | {"stream": True})).text
            assert (whole["stop_reason"], whole["stop_sequence"]) == expected, (reply, whole)
            assert again == whole
            reason, sequence = expected
            shown = "null" if sequence is None else f'"{sequence}"'
            assert f'"stop_reason":"{reason}","stop_sequence":{shown}' in streamed


async def test_the_journal_has_no_text_of_a_stop_sequence(stub: ProviderStub, tmp_path: Path) -> None:
    stub.always("alpha", STOPPED)
    async with serving(stub, tmp_path, "anthropic") as client:
        body = (await client.post("/v1/messages", json=ASKED | {"stop_sequences": ["STOP", "END"]})).json()
        events = (await client.get(f"/v1/runs/{body['baton']['run']}/events")).json()["data"]
    [done] = [event["body"] for event in events if event["kind"] == "step.done"]
    assert done["stop_sequence"] == 1
    assert "END" not in str(events)
