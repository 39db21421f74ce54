"""A conversation's texts are stored once, not once for each of its turns, whatever format its caller speaks."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection

from app.cli.runs.run_tree import read_run
from app.store.sql import SqlStore, open_store
from tests.harness.in_process import client_of, pool_text, running_service
from tests.stubs import ProviderStub, Reply

TURNS = 20
CHARS = 800
Caller = Callable[[httpx.AsyncClient, list[str], list[str]], Any]


def words(seed: int) -> str:
    """A text that no other seed gives."""
    chance = random.Random(seed)
    return " ".join(f"{chance.getrandbits(28):x}" for _ in range(CHARS // 8)) + ' "quoted"\n'


def conversation_so_far(questions: list[str], answers: list[str]) -> list[dict[str, Any]]:
    """The conversation so far, as chat completions and Anthropic's format have it."""
    turns = [{"role": "user", "content": questions[0]}]
    for answer, question in zip(answers, questions[1:], strict=True):
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return turns


async def chat(client: httpx.AsyncClient, questions: list[str], answers: list[str]) -> httpx.Response:
    body = {
        "model": "baton-mini",
        "messages": [{"role": "system", "content": "Be brief."}, *conversation_so_far(questions, answers)],
    }
    return await client.post("/v1/chat/completions", json=body)


async def anthropic(client: httpx.AsyncClient, questions: list[str], answers: list[str]) -> httpx.Response:
    body = {
        "model": "baton-mini",
        "max_tokens": 900,
        "system": "Be brief.",
        "messages": conversation_so_far(questions, answers),
    }
    return await client.post("/v1/messages", json=body)


async def responses(client: httpx.AsyncClient, questions: list[str], answers: list[str]) -> httpx.Response:
    body = {"model": "baton-mini", "input": conversation_so_far(questions, answers)}
    return await client.post("/v1/responses", json=body)


def caller_of_responses() -> Caller:
    """A caller of Responses that sends the last response's id instead of the conversation."""
    last: dict[str, str] = {}

    async def ask(client: httpx.AsyncClient, questions: list[str], answers: list[str]) -> httpx.Response:
        reply = await client.post("/v1/responses", json={"model": "baton-mini", "input": questions[-1], **last})
        last["previous_response_id"] = reply.json()["id"]
        return reply

    return ask


TABLES = {
    "contents": "length(body)",
    "shared_contents": "length(body) + coalesce(length(head), 0) + coalesce(length(tail), 0)",
    "texts": "length(body) + length(id) + coalesce(length(before), 0)",
}


def count_stored_bytes(conn: Connection) -> int:
    """The bytes of all texts that are stored, with those that join them."""
    sizes = [f"SELECT coalesce(sum({size}), 0) FROM {table}" for table, size in TABLES.items()]
    return sum([int(conn.exec_driver_sql(size).scalar_one()) for size in sizes])


CALLERS = {
    "chat": lambda: chat,
    "anthropic": lambda: anthropic,
    "responses": lambda: responses,
    "continued": caller_of_responses,
}


@pytest.mark.parametrize("make", CALLERS.values(), ids=CALLERS)
async def test_twenty_turns_store_little_more_than_their_texts(tmp_path: Path, make: Callable[[], Caller]) -> None:
    questions, answers = [words(2 * turn) for turn in range(TURNS)], [words(2 * turn + 1) for turn in range(TURNS)]
    distinct = sum(map(len, (*questions, *answers)))
    ask = make()
    async with ProviderStub() as stub:
        stub.script("alpha", *[Reply(chunks=(answer,)) for answer in answers])
        async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
            runs = []
            for turn in range(TURNS):
                reply = await ask(client, questions[: turn + 1], answers[:turn])
                assert reply.status_code == 200, reply.text
                runs.append(reply.headers["x-baton-run"])
            store = runtime.context.store
            assert isinstance(store, SqlStore)
            assert distinct <= await store._read(count_stored_bytes) <= 1.5 * distinct
            assert await store.erase_contents(runs[:-1]) == TURNS - 1
            async with open_store(runtime.pool.configuration.settings.database_url) as other:
                _, question = await read_run(other, await other.run(runs[-1]))
                assert question == questions[-1]
            assert await store.erase(runs[-1])
            assert await store._read(count_stored_bytes) == 0
