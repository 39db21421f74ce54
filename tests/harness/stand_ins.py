"""Stubs of everything behind the gateway: drivers that follow a script, a store in dictionaries, a ready queue."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, cast

import httpx
import orjson
import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from msgspec.structs import asdict, replace

from app.core.message.chat import Message, Task, Text, Usage, task_to_json
from app.core.pool.catalog import Amount, Catalog, ConductorSpec, Limits, Price, ProviderSpec, Tier, Worker
from app.core.pool.rates import RateReply, RateRequest, RunUse, Window, decide
from app.core.rating.economics import JournaledRun
from app.core.rating.feedback import Feedback
from app.core.run.caller_view import Position, bill
from app.core.run.events import Event, Fact, Kind
from app.core.run.fold import fold
from app.core.run.state import RunState
from app.engine.delivery.messages import AnswerPart, CallerMessage, FollowedRun, Mailbox, TurnEnd
from app.engine.runs.admission import Order
from app.engine.runs.approvals import Decision
from app.engine.runs.client import RunClient
from app.errors import BatonError, NotFound, RunCancelled
from app.gateway.http.api_keys import adopt
from app.gateway.http.connection import connection
from app.gateway.http.context import GatewayContext
from app.stepqueue.protocol import StepQueue
from app.store.protocol import (
    Actor,
    Backlog,
    Disclosure,
    DisclosureQuery,
    IdempotencyRecord,
    Journal,
    KeyQuery,
    KeyRow,
    LogState,
    Period,
    Proof,
    PrunedRun,
    Reader,
    RunDetails,
    RunFigures,
    RunQuery,
    RunRow,
    Store,
)
from app.telemetry import Telemetry
from tests.harness.prepared_apps import lent_app
from tests.harness.raw_facts import fact_from_json

PEPPER = b"pepper"
SECRET = "s" * 43
CALLER = ("runs:write", "runs:read", "audit:read", "approvals:decide")

CATALOG = Catalog(
    providers={"stub": ProviderSpec("stub", "rehearsal")},
    workers={
        "alpha": Worker("alpha", "stub", "alpha", Price(1_000_000, 2_000_000, 500_000)),
        "beta": Worker("beta", "stub", "beta", Price(3_000_000, 4_000_000, 100_000)),
    },
    tiers={
        "baton-mini": Tier(
            "baton-mini",
            ("alpha", "beta"),
            ConductorSpec("fixed", workers=("alpha",)),
            "beta",
            {"low": Limits(steps=1), "medium": Limits(), "high": Limits(steps=8)},
        )
    },
    aliases={"mini": "baton-mini"},
    digest="0" * 64,
    rehearsal=True,
)


WIRE = {"format": "responses", "store": True, "given": 1, "background": True}
"""What the stored run was asked for: a response in the background, which can be cancelled."""


PLAN_RUN = "run_planned"
"""The run of the first revision of a plan."""


APPROVED_RUN = "run_asks"
"""The run whose plan needed an approval, and got one."""


def journal_of(run: str, texts: Mapping[str, str], *, state: Kind = Kind.SUCCEEDED) -> tuple[Event, ...]:
    """Return the journal of a run of two steps, the second of which reads the first; `texts` maps refs to contents."""
    limits = asdict(Limits())
    admitted = {"task": "task", "tier": "baton-mini", "limits": limits, "deadline": 2e9, "pool": ["alpha", "beta"]}
    admitted |= {
        "conductor": "fixed",
        "streams": False,
        "labels": ["phi"],
        "excluded": {"gamma": "not cleared for phi"},
    }
    admitted |= {"effort": "medium", "model": "baton-mini", "catalog": "0" * 64, "rehearsal": True}
    admitted |= {"ignored": [], "preview": False, "wire": WIRE}
    if run == PLAN_RUN:
        admitted |= {"preview": True, "wire": {"format": "plan", "revision": 1, "reply": {"format": "chat"}}}
    if run == APPROVED_RUN:
        admitted |= {"approval": {"reasons": ["tier"]}}
    usages = (Usage(10, 4, 6, 1), Usage(30, 0, 7, 2))
    drafts = [
        fact_from_json(Kind.ADMITTED, admitted),
        fact_from_json(
            Kind.PLAN_OPENED, {"proposal": 0, "base": 0, "mode": "first", "conductor": "fixed", "order": ["alpha"]}
        ),
        *(_plan_step(n) for n in (0, 1)),
        fact_from_json(Kind.PLAN_ACCEPTED, {"proposal": 0, "call": "", "steps": 2, "topology": "chain"}),
    ]
    drafts += _approval_facts() if run == APPROVED_RUN else []
    for n, usage in enumerate(usages):
        drafts += _execution_facts(n, usage, len(texts[f"output{n}"]))
    end = {"step": 1, "usd": 100, "answer": "output1", "finish": "stop"}
    drafts.append(fact_from_json(state, end if state is Kind.SUCCEEDED else {"step": None, "error": "run_failed"}))
    return tuple(Event.of(run, seq, 1e9 + seq, draft) for seq, draft in enumerate(drafts, 1))


def _approval_facts() -> list[Fact]:
    """The question for an approval, and the answer."""
    asked = {"turn": 0, "proposal": 0, "digest": "0" * 64, "plan": "1" * 64, "until": 2e9, "seconds": 9.0, "price": 7}
    asked |= {
        "reasons": ["tier"],
        "workers": {"alpha": "2" * 32},
        "catalog": "0" * 64,
        "discloses": {"alpha": ["user"]},
    }
    given = {"proposal": 0, "digest": "0" * 64, "binding": "3" * 64, "by": "key:boss", "deadline": 2e9}
    given |= {"workers": {"alpha": "2" * 32}, "max_usd": 9}
    return [
        fact_from_json(Kind.AWAITING_APPROVAL, asked),
        fact_from_json(Kind.APPROVED, given),
    ]


def _plan_step(n: int) -> Fact:
    body = {"proposal": 0, "n": n, "worker": "alpha", "subtask": f"subtask{n}", "answers": n == 1, "probability": 0.5}
    return fact_from_json(Kind.PLAN_STEP, body | {"access": ["user", 0] if n else ["user"]})


def _execution_facts(n: int, usage: Usage, chars: int) -> list[Fact]:
    call, access = f"call_{n}", ["user", 0] if n else ["user"]
    intended = {"call": call, "n": n, "attempt": 1, "worker": "alpha", "provider": "stub", "model": "alpha"}
    intended |= {"access": access, "request": "00", "bytes": 9, "max_tokens": 9, "usd_held": 99, "tokens_held": 9}
    finished = {
        "call": call,
        "n": n,
        "outcome": "ok",
        "usage": asdict(usage),
        "usd": 50,
        "seconds": 0.25,
        "first": 0.1,
    }
    done = {"n": n, "output": f"output{n}", "chars": chars, "finish": "stop", "call": call}
    return [
        fact_from_json(Kind.STEP_QUEUED, {"n": n}),
        fact_from_json(Kind.CALL_INTENDED, intended),
        fact_from_json(Kind.CALL_FINISHED, finished | {"finish": "stop", "output": f"output{n}"}),
        fact_from_json(Kind.STEP_DONE, done),
    ]


TASK = Task((Message("user", (Text("What is 2 + 2?"),)),))
TEXTS = {"subtask0": "Think.", "subtask1": "Answer.", "output0": "Two twos.", "output1": "Four."}


def state_of(run: str, state: Kind = Kind.SUCCEEDED) -> RunState:
    """Return the state that `journal_of` folds to."""
    return fold(journal_of(run, TEXTS, state=state))


def turn_end(run: str, answer: str = "Four.", error: BatonError | None = None) -> TurnEnd:
    """Return the message that ends a run."""
    state = state_of(run, Kind.SUCCEEDED if error is None else Kind.FAILED)
    return TurnEnd(state, answer, "stop", bill(state), error)


TOKENS_PER_RUN = 53
"""Tokens of each run."""
Script = Callable[[Order, str, Mailbox[CallerMessage]], Awaitable[None]]


async def answer_four(_order: Order, run: str, line: Mailbox[CallerMessage]) -> None:
    """Answer "Four." in three pieces: the script of a run that has no other."""
    for text, at in (("Fo", 2), ("ur", 4), (".", 5)):
        line.put(AnswerPart(text, at=at))
    line.put(turn_end(run))


class NoChanges:
    """Changes of runs of which there are none."""

    number = 0

    async def after(self, number: int, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return number


class ScriptedRuns:
    """Drivers whose runs follow `script`; a cancelled run ends as cancelled."""

    def __init__(self) -> None:
        self.script: Script = answer_four
        self.orders: list[Order] = []
        self.cancelled: list[tuple[str, str]] = []
        self.stopped = asyncio.Event()
        self.changes = NoChanges()
        self.refusal: BatonError | None = None
        self.uses: dict[str, RunUse] = {}
        """What the journal has of the runs, for their rates."""
        self.now: Callable[[], float] = lambda: 0.0
        self.listed: Callable[[str, Order], None] = lambda run, order: None
        """Is called with each run that is begun."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lines: dict[str, Mailbox[CallerMessage]] = {}

    async def start(self, order: Order) -> FollowedRun:
        """Start a run and its script."""
        if self.refusal is not None:
            raise self.refusal
        run = order.run or f"run_{len(self.orders)}"
        self.orders.append(order)
        self.listed(run, order)
        self.uses[run] = RunUse(seq=1, tokens=0, waits=False)
        state = state_of(run)
        turn = replace(state.turn, streams=order.streams, wire=order.wire)
        line = self._lines[run] = Mailbox(1_000_000)
        if self.script is answer_four:
            await self._play(order, run, line)
        else:
            self._tasks[run] = asyncio.create_task(self._play(order, run, line))
        return FollowedRun(run, line, replace(state, turn=turn))

    async def _play(self, order: Order, run: str, line: Mailbox[CallerMessage]) -> None:
        await self.script(order, run, line)
        self.uses[run] = RunUse(seq=2, tokens=TOKENS_PER_RUN, waits=False, ended_at=self.now())

    async def attach(self, run: str, at: Position = Position(), **_which: object) -> FollowedRun:
        """Follow a run that has ended."""
        line: Mailbox[CallerMessage] = Mailbox(10)
        line.put(turn_end(run))
        return FollowedRun(run, line, state_of(run), replayed=True)

    async def decide(self, run: str, tenant: str | None, decision: Decision) -> None:
        """Take a decision on a plan."""

    def leave(self, followed_run: FollowedRun) -> None:
        """Cancel the run: nobody else follows it, and it is to end then."""
        self.cancel(followed_run.run, "client")

    def cancel(self, run: str, by: str) -> None:
        """Stop the script and end the run."""
        self.cancelled.append((run, by))
        self.stopped.set()
        if run in self._tasks:
            self._tasks[run].cancel()
        self.uses[run] = RunUse(seq=2, tokens=TOKENS_PER_RUN, waits=False, ended_at=self.now())
        self._lines[run].put(turn_end(run, "", RunCancelled()))


class OneEntryLog:
    """The log of a `DictionaryStore`: one entry, about nothing."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    async def state(self) -> LogState:
        self._check()
        return LogState(1, "log\n1\n\n", 0.0, (), stored_key=False, waiting=0, lag=0.0, catching_up=False)

    async def tile(self, level: int, number: int) -> bytes:
        self._check()
        return bytes(32) if (level, number) == (0, 0) else b""

    async def entries(self, number: int) -> Sequence[bytes]:
        self._check()
        return () if number else (b"{}",)

    async def proof(self, _run: str) -> Proof:
        self._check()
        return Proof(None, ())


class DictionaryLists:
    """The lists of a `DictionaryStore`."""

    def __init__(self, store: "DictionaryStore") -> None:
        self._store = store

    async def count(self, query: RunQuery, most: int) -> int:
        return len(await self._store.runs(replace(query, limit=most)))

    async def figures(self, period: Period) -> RunFigures:
        return RunFigures(period.since, (), (), period.since, (), (), (), 0, (), ())

    async def details(self, runs: Sequence[str]) -> Mapping[str, RunDetails]:
        return {run: RunDetails(("alpha",), is_preview=run == PLAN_RUN) for run in runs}


class DictionaryStore:
    """The part of a store that the gateway reads, in dictionaries; every verb raises `fault` while it is set."""

    healthy = True

    def __init__(self) -> None:
        self.key_rows: dict[str, KeyRow] = {}
        self.rows: list[RunRow] = []
        self.stored_contents: dict[str, bytes] = {}
        self.claims: dict[str, IdempotencyRecord] = {}
        self.ratings: dict[str, Feedback] = {}
        self.fault: Exception | None = None
        self.lookups = 0
        self.windows: dict[str, Window] = {}
        self.uses: Mapping[str, RunUse] = {}
        self.counted = 0
        self.queries: list[RunQuery] = []
        self.log = OneEntryLog(self._check)
        self.lists = DictionaryLists(self)

    def _check(self) -> None:
        if self.fault is not None:
            raise self.fault

    def of_tenant(self, _tenant: str | None) -> "DictionaryStore":
        return self

    def administration_of(self, _tenant: str | None) -> "DictionaryStore":
        return self

    async def keys(self, query: KeyQuery) -> tuple[KeyRow, ...]:
        self._check()
        return tuple([row for row in self.key_rows.values() if query.ids is None or row.id in query.ids])

    async def key(self, public_id: str) -> KeyRow | None:
        self.lookups += 1
        self._check()
        return self.key_rows.get(public_id)

    async def rehash_key(self, public_id: str, *, was: bytes, digest: bytes, pepper: str) -> bool:
        self._check()
        row = self.key_rows[public_id]
        if row.digest != was:
            return False
        self.key_rows[public_id] = replace(row, digest=digest, pepper=pepper)
        return True

    async def erase(self, run: str, *, by: Actor) -> bool:
        self._check()
        return True

    async def find_holds_by_run(self, runs: Sequence[str]) -> Mapping[str, str]:
        self._check()
        return {}

    async def run(self, run: str) -> RunRow:
        self._check()
        for row in self.rows:
            if row.id == run:
                return row
        raise NotFound()

    async def pruned_run(self, run: str) -> PrunedRun:
        self._check()
        raise NotFound()

    async def runs(self, query: RunQuery) -> tuple[RunRow, ...]:
        self._check()
        self.queries.append(query)
        rows = [row for row in self.rows if query.tenant in (None, row.tenant) and query.state in (None, row.state)]
        if "plan" in dict(query.tags):  # of plans it has one first revision, which no list needs
            rows = []
        if query.sort == "cost":
            rows = sorted(rows, key=lambda row: (row.spent.usd, row.id), reverse=True)
            return tuple([row for row in rows if row.ended_at is not None][: query.limit])
        rows.sort(key=lambda row: (row.created_at, row.id), reverse=True)
        rows = [row for row in rows if query.before is None or (row.created_at, row.id) < query.before]
        return tuple(rows[: query.limit])

    async def note_read(self, run: str, tenant: str, what: str, *, by: Actor, digest: str = "") -> None:
        self._check()

    async def disclosures(self, query: DisclosureQuery) -> tuple[Disclosure, ...]:
        self._check()
        return ()

    async def journaled_runs(self, query: RunQuery) -> tuple[JournaledRun, ...]:
        self._check()
        self.queries.append(query)
        return ()

    async def journal(self, run: str, upto: int | None = None, after: int = 0) -> Journal:
        self._check()
        events = journal_of(run, TEXTS)
        return Journal(b"salt", tuple(event for event in events if event.seq > after))

    async def catalogs(self, digests: Sequence[str]) -> Mapping[str, bytes]:
        self._check()
        return {}

    async def records(self, run: str, keys: Collection[tuple[str, Reader]]) -> Mapping[tuple[str, Reader], Any]:
        bodies = await self.contents(run, [ref for ref, _ in keys])
        return {(ref, read): read(bodies[ref]) for ref, read in keys if ref in bodies}

    async def contents(self, run: str, refs: Sequence[str]) -> Mapping[str, bytes]:
        self._check()
        return {ref: self.stored_contents[ref] for ref in refs if ref in self.stored_contents}

    async def find_idempotency_record(self, claim: str, now: float) -> IdempotencyRecord | None:
        self._check()
        return self.claims.get(claim)

    async def add_idempotency_record(self, once: IdempotencyRecord, now: float) -> IdempotencyRecord:
        self._check()
        return self.claims.setdefault(once.id, once)

    async def count_requests(self, requests: Sequence[RateRequest], now: float) -> tuple[RateReply, ...]:
        self._check()
        self.counted += len(requests)
        for name in [name for rate_request in requests for name, _ in rate_request.limits]:
            self.windows.setdefault(name, Window())
        return decide(self.windows, requests, self.uses, now)

    async def give_back(self, request: RateRequest) -> None:
        self._check()
        for name, _ in request.limits:
            self.windows[name].give_back(request.run)

    async def rate(self, rating: Feedback) -> Feedback:
        self._check()
        return self.ratings.setdefault(rating.id, rating)

    async def feedback(self, run: str) -> tuple[Feedback, ...]:
        self._check()
        return tuple(rating for rating in self.ratings.values() if rating.run == run)

    async def ready(self) -> None:
        self._check()

    async def budgets(self, _tenant: str | None = None) -> tuple[()]:
        self._check()
        return ()

    async def changes(self) -> tuple[()]:
        self._check()
        return ()

    async def backlog(self, now: float, most: int) -> Backlog:
        self._check()
        return Backlog(0, None)


class ReadyQueue:
    """A queue that is always ready."""

    healthy = True

    async def ready(self) -> None:
        return


def row_of(run: str, tenant: str, created_at: float = 1e9, **changes: Any) -> RunRow:
    """Return a run's row."""
    row = RunRow(
        id=run,
        tenant=tenant,
        key="key",
        tier="baton-mini",
        model="mini",
        state="succeeded",
        created_at=created_at,
        deadline=2e9,
        epoch=1,
        driver="d",
        lease_until=2e9,
        seq=14,
        cap=Amount(2_000_000, 400_000),
        held=Amount(),
        spent=Amount(100, 53),
        topology="chain",
        degraded=False,
        steps=2,
        ended_at=created_at + 1,
        error=None,
    )
    return replace(row, **changes)


class GatewayStandIn:
    """A gateway over stubs, with clocks that tests may move."""

    def __init__(self, **changes: Any) -> None:
        self.runs = ScriptedRuns()
        self.store = DictionaryStore()
        self.seconds = 1_000_000_000.0
        self.ticks = 0.0
        self.names = 0
        self.peppers: tuple[bytes, ...] = (PEPPER,)
        self.runs.now = lambda: self.seconds
        self.store.uses = self.runs.uses
        self.runs.listed = self._list_replay
        self.telemetry = Telemetry()
        self.context = GatewayContext(
            store=cast(Store, self.store),
            queue=cast(StepQueue, ReadyQueue()),
            runs=cast(RunClient, self.runs),
            catalog=lambda: CATALOG,
            telemetry=self.telemetry,
            peppers=lambda: self.peppers,
            now=lambda: self.seconds,
            tick=lambda: self.ticks,
            name=self._name,
            **changes,
        )

    @cached_property
    def app(self) -> FastAPI:
        """The application, lent to the present test when it is first asked for, unless it was set before."""
        return lent_app(self.context)

    def _list_replay(self, run: str, order: Order) -> None:
        if order.origin_kind:
            self.store.rows.append(row_of(run, order.tenant, origin_kind=order.origin_kind))

    def _name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}_{self.names}"

    def add_key(self, public: str = "caller", tenant: str = "acme", scopes: Sequence[str] = CALLER, **more: Any) -> str:
        """Make a key and return its string."""
        key = f"bt_{public}_{SECRET}"
        row = adopt(key, PEPPER, tenant=tenant, name=public, scopes=scopes, now=0.0)
        self.store.key_rows[public] = replace(row, **more)
        return key

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        """Return a client that calls the application without a socket."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://baton", headers=headers)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Serve the application on a real socket; yield its base URL."""
        async with serving(self.app, self.context) as url:
            yield url


@asynccontextmanager
async def serving(
    app: FastAPI, context: GatewayContext, *, head_seconds: float = 30.0, keep_alive: int = 5
) -> AsyncIterator[str]:
    """Run uvicorn on loopback in this loop, with the connections of the real service; yield its base URL."""
    http = connection(context, head_seconds)
    config = uvicorn.Config(
        app, http=http, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=keep_alive
    )
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve([listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        await task


def chat_body(text: str = "What is 2 + 2?", **more: Any) -> dict[str, Any]:
    """Return the body of a request."""
    return {"model": "baton-mini", "messages": [{"role": "user", "content": text}]} | more


def store_contents(store: DictionaryStore) -> None:
    """Put the contents of `journal_of` into the store."""
    store.stored_contents = {ref: text.encode() for ref, text in TEXTS.items()} | {
        "task": orjson.dumps(task_to_json(TASK))
    }


def api_routes(routes: list[object]) -> Iterator[APIRoute]:
    """Yield every route of an application, and of the routers inside it."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        else:
            yield from api_routes(getattr(getattr(route, "original_router", route), "routes", []))
