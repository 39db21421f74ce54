"""A whole service inside a test: the real wiring over stub providers, an SQLite file or Postgres, memory or Redis.

`pool_text` writes the pool file, `running_service` runs drivers and a dispatcher over it,
and `finish` collects one run.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from app.core.message.chat import Message, Task, Text, ToolDelta
from app.core.pool.catalog import Limits
from app.core.run.events import Event, Kind
from app.engine.delivery.messages import AnswerPart, FollowedRun, StepEvent, TurnEnd
from app.engine.runs.admission import Order
from app.gateway.http.api_keys import mint
from app.gateway.runs import cancel
from app.process.config import configure
from app.process.wiring import Runtime, open_runtime
from app.store.protocol import RunRow, Store
from tests.harness.audited import audit_once
from tests.harness.prepared_apps import app_over
from tests.harness.waiting import PATIENCE_SECONDS, until
from tests.stubs import ProviderStub, Reply

LONG_LEASE = {"BATON_LEASE_SECONDS": "300"}
"""Settings with a lease that outlives every test: what a driver learns when it renews its lease comes too late."""
CLOCK_READINGS = 3
"""Tries to read the database's clock, before which nothing is begun."""
WORKERS = ("alpha", "beta", "gamma", "planner")
ANSWERS = {"alpha": "The draft.", "beta": "The first answer.", "gamma": "The better answer."}

POOL = """
[providers.stub]
format = "openai"
base_url = "{url}"
options = {{ positional = "true", logprobs = "true" }}
deadlines = {{ connect = 30 }}

{workers}

[tiers.baton-mini]
pool = ["alpha", "beta", "gamma"]
conductor = {{ kind = "fixed", shape = "single", workers = ["alpha"] }}
fallback = "beta"
limits = {{ steps = 5, attempts = 4, seconds = 30, output_tokens = 1000 }}

[tiers.baton-ultra]
pool = ["alpha", "beta", "gamma"]
conductor = {{ kind = "model", worker = "planner" }}
fallback = "beta"
limits = {{ steps = 5, attempts = 4, seconds = 30, output_tokens = 1000 }}
"""
"""A worker that cannot be reached within `connect` is replaced by another one, so it is longer than a crowded machine
stands still."""
ROUNDS = """
[tiers.baton-deep]
pool = ["alpha", "beta", "gamma"]
conductor = {{ kind = "model", worker = "planner" }}
fallback = "beta"
limits = {{ steps = 3, rounds = 3, attempts = 2, seconds = 30, output_tokens = 1000 }}

[tiers.baton-nested]
pool = ["alpha", "beta", "gamma"]
conductor = {{ kind = "model", worker = "planner" }}
fallback = "beta"
limits = {{ steps = 4, depth = 2, rounds = 2, attempts = 2, seconds = 30, output_tokens = 1000 }}

[tiers.baton-again]
pool = ["alpha", "beta", "gamma"]
conductor = {{ kind = "fixed", shape = "single", workers = ["alpha", "beta"], again = true }}
limits = {{ steps = 3, rounds = 2, attempts = 2, seconds = 30, output_tokens = 1000 }}
"""
"""Tiers whose runs may have several rounds, and workflows inside steps."""
WORKER = """
[workers.{name}]
provider = "stub"
model = "{name}"
price = {{ input = 1.00, output = 2.00, cached = 0.50 }}
strengths = ["general"]
tools = true
"""


def pool_text(stub: ProviderStub) -> str:
    """Return a pool file of three workers and a conductor, all at the stub."""
    return (POOL + ROUNDS).format(url=stub.vllm_url, workers="".join(WORKER.format(name=name) for name in WORKERS))


@asynccontextmanager
async def running_service(
    folder: Path,
    pool: str,
    environ: Mapping[str, str] | None = None,
    *,
    dispatches: bool = True,
    drives: bool = True,
    audits: bool = True,
) -> AsyncIterator[Runtime]:
    """Open the service in this loop: a gateway, and an engine unless `drives` is false.

    Without `dispatches` the engine drives runs and leaves their steps to their tickets, which nobody takes.

    When it has closed, and unless a test has failed or does wrong on purpose (`audits`), the independent auditor must
    find nothing wrong with the journal. What is new in a request is to be rebuilt in `app/audit/request_rebuilding.py`.

    Where an engine drives, whoever cancels a run waits for its end for as long as a busy machine needs.
    """
    path = folder / "pool.toml"
    path.write_text(pool)
    base = {
        "BATON_POOL": str(path),
        "BATON_DATA_DIR": str(folder),
        "BATON_PEPPER": "p" * 32,
        "BATON_LEASE_SECONDS": "2",
    }
    patience = PATIENCE_SECONDS if drives else cancel.PATIENCE
    async with open_runtime(configure(base | dict(environ or {}))) as runtime:
        drivers_end, steps_end = asyncio.Event(), asyncio.Event()
        for _ in range(CLOCK_READINGS):
            if not runtime.clock.is_set:
                await runtime.clock.read()
        async with asyncio.TaskGroup() as group:
            group.create_task(runtime.runs.run(drivers_end))
            group.create_task(runtime.webhooks.run(drivers_end))
            if not drives:
                runtime.runs.engine = None
            else:
                group.create_task(runtime.drivers.run(drivers_end))
            if drives and dispatches:
                group.create_task(runtime.dispatcher.run(steps_end))
            elif drives:
                runtime.drivers.dispatcher = None
            await until(lambda: runtime.runs.is_open and (not drives or runtime.drivers.is_open))
            try:
                with patch.object(cancel, "PATIENCE", patience):
                    yield runtime
            finally:
                drivers_end.set()
                steps_end.set()
    if audits:
        found = (await audit_once(runtime.pool.configuration.settings.database_url)).violations
        assert not found, "\n".join(map(str, found))


@asynccontextmanager
async def client_of(runtime: Runtime, name: str = "caller", tenant: str = "acme") -> AsyncIterator[httpx.AsyncClient]:
    """Open a client with a key in the real store, which calls the application without a socket."""
    scopes = ["runs:write", "runs:read", "audit:read"]
    key, row = mint(runtime.gateway.pepper, tenant=tenant, name=name, scopes=scopes, now=0.0)
    assert await runtime.gateway.store.add_key(row)
    headers = {"authorization": f"Bearer {key}"}
    with app_over(runtime.gateway) as app:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://baton", headers=headers, timeout=PATIENCE_SECONDS
        ) as client:
            yield client


async def ask(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    """Ask `baton-mini` one question on the route of chat completions."""
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    return await client.post("/v1/chat/completions", json={"model": "baton-mini", "messages": messages} | more)


def order(runtime: Runtime, tier: str, text: str = "What is 2 + 2?", **changes: Any) -> Order:
    """Return an order of one user message."""
    chosen = runtime.pool.catalog().tiers[tier]
    limits = changes.pop("limits", chosen.efforts[chosen.effort])
    task = changes.pop("task", Task((Message("user", (Text(text),)),)))
    return Order(task, chosen, tier, chosen.effort, limits, "tenant", "key", **changes)


def limits_with(runtime: Runtime, tier: str, **limits: Any) -> Limits:
    """Return the tier's limits with some of them changed."""
    chosen = runtime.pool.catalog().tiers[tier]
    return Limits(**{**{name: getattr(chosen.efforts[chosen.effort], name) for name in Limits.__slots__}, **limits})


@dataclass
class Outcome:
    """Everything that a caller received of a run."""

    ended: TurnEnd
    texts: list[str] = field(default_factory=list)
    step_events: list[StepEvent] = field(default_factory=list)
    tool_deltas: list[ToolDelta] = field(default_factory=list)


async def finish(followed_run: FollowedRun, within: float = PATIENCE_SECONDS) -> Outcome:
    """Read a run's messages until it has ended; raises TimeoutError after `within` seconds."""
    texts: list[str] = []
    step_events: list[StepEvent] = []
    tool_deltas: list[ToolDelta] = []
    async with asyncio.timeout(within):
        while True:
            for message in await followed_run.mailbox.take(1.0):
                if isinstance(message, AnswerPart):
                    if message.text or not message.calls:
                        texts.append(message.text)
                    tool_deltas += message.calls
                elif isinstance(message, StepEvent):
                    step_events.append(message)
                else:
                    return Outcome(message, texts, step_events, tool_deltas)


def latest_request(stub: ProviderStub, worker: str) -> dict[str, Any]:
    """Return what a worker was sent last, but for the fields that ask for a stream: they depend on how quick it was."""
    sent = stub.requests_for(worker)[-1].json
    return {name: value for name, value in sent.items() if name not in ("stream", "stream_options")}


async def await_ended_row(store: Store, run: str) -> RunRow:
    """Return the run's row once it has ended."""

    async def find_ended_row() -> RunRow | None:
        row = await store.run(run)
        return None if row.ended_at is None else row

    row = await until(find_ended_row, what=f"{run} has ended")
    assert row is not None
    return row


async def events(runtime: Runtime, run: str) -> tuple[Event, ...]:
    """Return the run's journal."""
    return (await runtime.context.store.journal(run)).events


def kinds(journal: tuple[Event, ...]) -> list[Kind]:
    """Return the kinds of these events, in order."""
    return [event.kind for event in journal]


def bodies_of(journal: Sequence[Event], kind: Kind, **fields: Any) -> list[dict[str, Any]]:
    """Return the bodies of the events of this kind that have these values."""
    return [dict(event.body) for event in journal if event.kind is kind and fields.items() <= event.body.items()]


def plan(*steps: tuple[Any, str, list[Any]]) -> dict[str, Any]:
    """Return a plan as a JSON value."""
    return {"steps": [{"worker": worker, "subtask": subtask, "access": access} for worker, subtask, access in steps]}


def plan_text(*steps: tuple[Any, str, list[Any]]) -> str:
    """Return a plan as a conductor writes it."""
    return json.dumps(plan(*steps))


def script_answers(stub: ProviderStub) -> None:
    """Let each worker answer with its words in `ANSWERS` whenever it is asked."""
    for name, words in ANSWERS.items():
        stub.always(name, Reply(chunks=(words,)))


def script_plans(stub: ProviderStub, *texts: str) -> None:
    """Let the conductor answer with these texts, one for each time that it is asked.

    Ordinals are shuffled by the run's id; each worker's card says which it is, so that plans may name any of them.
    """
    stub.script("planner", *(Reply(chunks=(text,)) for text in texts))
