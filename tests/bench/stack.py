"""Two processes that do with the libraries of the stack what Baton does with them for a run, and nothing else.

The gateway answers completions by FastAPI, and the engine calls the workers by httpx over aiohttp. Between them are
Postgres through asyncpg and Redis through redis-py's connections, used in the cheapest way that Baton knows: one
prepared statement for each commit, commits and messages that share a round trip when they meet, and no transaction of
SQLAlchemy's. Each run has as many commits, rows, values, reads, messages and calls as one of Baton's, in the same order
and of about the same size. Nothing is decided, checked, folded, hashed, priced or parsed, but for the request. What
this service takes is therefore a floor for Baton with this stack on this machine; `floor.py` measures it.

The sizes are those of Baton's statements and messages, as a trace of its processes had them in November 2026. Where
they cannot be equal they are smaller.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from typing import Any, Generic, Literal, TypeVar

import asyncpg
import orjson
import redis.asyncio as redis
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import Struct
from pydantic import BaseModel, ConfigDict

from app.network.http_client import async_client
from app.store.sqlkit.statements import BY_KEY
from tests.harness import servers

from . import load
from .processes import start_process
from .subject import WORKERS, Target, Tree, one_step

T = TypeVar("T")

GATEWAY, ENGINE, TICKETS, GROUP = "stack:gateway", "stack:engine", "stack:tickets", "engines"
RUN_KEY = "run"
FILL = "0123456789"
"""A value of a row, as long as most are."""
WORKER_REQUEST_BYTES = 900
COLUMNS = {"runs": 34, "events": 5, "disclosures": 23, "contents": 3, "tags": 3, "tickets": 10}
"""The tables, with the columns that Baton writes of each. The first two are the run and a key within it."""


class Write(Struct, frozen=True):
    """Rows of one kind in a commit: their table, how many values each has, and what is done with it."""

    table: str
    values: int
    verb: Literal["insert", "update", "delete"] = "insert"


WRITES = {
    "new run": Write("runs", 34),
    "run": Write("runs", 17, "update"),
    "event": Write("events", 5),
    "content": Write("contents", 3),
    "tag": Write("tags", 3),
    "intent": Write("disclosures", 23),
    "outcome": Write("disclosures", 5, "update"),
    "ticket": Write("tickets", 10),
    "done ticket": Write("tickets", 2, "delete"),
}


class Commit(Struct, frozen=True):
    """One commit as Baton writes it: its rows besides those of the run and its steps, and the message that follows."""

    events: int
    contents: int = 0
    tags: int = 0
    size: int = 1_000
    """Bytes of all values."""
    message: int = 0
    """Bytes of the message to the other process; 0 where there is none."""


ADMITTED = Commit(events=1, contents=2, tags=1, size=2_400)
PLANNED = Commit(events=5, contents=1, tags=1, size=1_800, message=1_150)
FINISHED = Commit(events=3, contents=1, size=1_950, message=1_690)
PLANNED_1_2_1 = Commit(events=8, contents=4, tags=5, size=2_900, message=1_690)
ENDED_FIRST = Commit(events=6, contents=1, size=3_290, message=1_640)
ENDED_ONE_OF_TWO = Commit(events=2, contents=1, size=1_580, message=670)
ENDED_BOTH = Commit(events=4, contents=1, size=2_440, message=1_160)
RESUMED = Commit(events=2, contents=4, tags=1, size=2_560, message=650)
INTENDED = Commit(events=1, size=1_050, message=610)
AWAITING = Commit(events=3, contents=2, size=1_460, message=1_200)


class Batcher(Generic[T]):
    """Carries out one batch at a time; items that come meanwhile are the next batch."""

    def __init__(self, carry_out: Callable[[Sequence[T]], Awaitable[None]]) -> None:
        self._carry_out_batch = carry_out
        self._waiting: list[tuple[T, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    def put(self, item: T) -> asyncio.Future[None]:
        """Add an item to the next batch. The future is done when that batch is."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return future

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await self._carry_out_batch([item for item, _ in batch])
            except Exception as problem:
                for _, future in batch:
                    future.set_exception(problem)
            else:
                for _, future in batch:
                    future.set_result(None)
        self._task = None


@cache
def part(write: Write, number: int, first: int) -> str:
    """Return the part of a statement that writes such rows. Each of their values is an array parameter, and `first` is
    the number of the first of these."""
    names = [f"c{column}" for column in range(1, write.values + 1)]
    arrays = [f"${parameter}::text[]" for parameter in range(first, first + write.values)]
    source = f"unnest({', '.join(arrays)}) AS given({', '.join(names)})"
    same = f"{write.table}.c1 = given.c1 AND {write.table}.c2 = given.c2"
    if write.verb == "insert":
        change = f"INSERT INTO {write.table} ({', '.join(names)}) SELECT * FROM {source}"
    elif write.verb == "update":
        changes = ", ".join(f"{name} = given.{name}" for name in names[2:])
        change = f"UPDATE {write.table} SET {changes} FROM {source} WHERE {same}"
    else:
        change = f"DELETE FROM {write.table} USING {source} WHERE {same}"
    return f"part_{number} AS ({change})"


Rows = Mapping[str, list[list[str]]]
"""The rows of a commit by their kind in `WRITES`."""


class Database:
    """One connection that commits and one that reads."""

    def __init__(self, writer: asyncpg.Connection, reader: asyncpg.Connection) -> None:
        self._writer, self._reader = writer, reader
        self._prepared: dict[str, Any] = {}
        self._commits = Batcher(self._commit)
        self._reading = asyncio.Lock()
        self._numbers = itertools.count()

    async def commit(
        self,
        what: Commit,
        run: str,
        *,
        new_run: bool = False,
        new_steps: Sequence[str] = (),
        ended_steps: Sequence[str] = (),
    ) -> None:
        """Write what such a commit has. `new_steps` and `ended_steps` name steps."""
        keys = {
            "new run" if new_run else "run": [RUN_KEY],
            "event": self._keys(what.events),
            "content": self._keys(what.contents),
            "tag": self._keys(what.tags),
            "intent": new_steps,
            "ticket": new_steps,
            "outcome": ended_steps,
            "done ticket": ended_steps,
        }
        rows: dict[str, list[list[str]]] = {}
        written = 0
        for kind, those in keys.items():
            values = WRITES[kind].values
            rows[kind] = [[run, key, *[FILL] * (values - 2)] for key in those]
            written += len(those) * values * len(FILL)
        rows["event"][0][-1] = "x" * max(what.size - written, 0)
        await self._commits.put(rows)

    async def read(self, table: str, run: str) -> None:
        """Read one row of a run by its id."""
        async with self._reading:
            statement = await self._statement(f"SELECT * FROM {table} WHERE c1 = $1 LIMIT 1", self._reader)
            await statement.fetch(run)

    def _keys(self, count: int) -> list[str]:
        return [f"{next(self._numbers)}" for _ in range(count)]

    async def _commit(self, batch: Sequence[Rows]) -> None:
        """Write the rows of all entries in one statement, each column as one array."""
        parts: list[str] = []
        columns: list[Any] = []
        for kind, write in WRITES.items():
            rows: list[list[str]] = []
            for entry in batch:
                rows.extend(entry.get(kind, ()))
            if rows:
                parts.append(part(write, len(parts), len(columns) + 1))
                columns.extend(zip(*rows, strict=True))
        statement = await self._statement(f"WITH {', '.join(parts)} SELECT 1", self._writer)
        await statement.fetch(*columns)

    async def _statement(self, text: str, connection: asyncpg.Connection) -> Any:
        if text not in self._prepared:
            self._prepared[text] = await connection.prepare(text)
        return self._prepared[text]


async def create_tables(url: str) -> None:
    """Create the tables, each with an index of the run and the key within it."""
    connection = await asyncpg.connect(url)
    try:
        for table, columns in COLUMNS.items():
            names = ", ".join(f"c{column} text" for column in range(1, columns + 1))
            await connection.execute(f"CREATE TABLE {table} ({names}); CREATE INDEX ON {table} (c1, c2)")
    finally:
        await connection.close()


class Bus:
    """Messages and tickets over redis-py's connections, one exchange at a time; those that meet share one."""

    def __init__(self, url: str) -> None:
        pool: Any = redis.ConnectionPool.from_url(url, protocol=2, socket_timeout=None)
        self._connection, self._reading, self._subscribed = [pool.make_connection() for _ in range(3)]
        self._sends = Batcher(self._send)

    def publish(self, channel: str, run: str, kind: str, text: str) -> None:
        """Send a message about a run."""
        self._sends.put(("PUBLISH", channel, orjson.dumps([run, kind, text])))

    def add_ticket(self, run: str) -> None:
        """Add a ticket to the stream."""
        self._sends.put(("XADD", TICKETS, "*", "t", f"{run} {FILL * 15}"))

    def delete_ticket(self, number: bytes) -> None:
        """Acknowledge a ticket and delete it."""
        self._sends.put(("XACK", TICKETS, GROUP, number))
        self._sends.put(("XDEL", TICKETS, number))

    async def _send(self, commands: Sequence[Any]) -> None:
        await _exchange(self._connection, *commands)

    async def tickets(self) -> AsyncIterator[tuple[bytes, str]]:
        """Yield the numbers of tickets and the runs that they are for."""
        with suppress(redis.ResponseError):  # it exists
            await _exchange(self._reading, ("XGROUP", "CREATE", TICKETS, GROUP, "0", "MKSTREAM"))
        look = ("XREADGROUP", "GROUP", GROUP, "one", "COUNT", 64, "BLOCK", 1_000, "STREAMS", TICKETS, ">")
        while True:
            (reply,) = await _exchange(self._reading, look)
            for number, (_, text) in reply[0][1] if reply else ():
                yield number, text.decode().partition(" ")[0]

    async def messages(self, channel: str) -> AsyncIterator[tuple[str, str, str]]:
        """Yield the messages of a channel: run, kind and text."""
        await _exchange(self._subscribed, ("SUBSCRIBE", channel))
        while True:
            _, _, payload = await self._subscribed.read_response(timeout=None, disconnect_on_error=False)
            run, kind, text = orjson.loads(payload)
            yield run, kind, text


async def _exchange(connection: Any, *commands: Any) -> list[Any]:
    if not connection.is_connected:
        await connection.connect()
    await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    return [await connection.read_response() for _ in commands]


class CompletionRequest(BaseModel):
    """The request's fields on which the flow depends."""

    model_config = ConfigDict(extra="allow")
    model: str
    messages: list[dict[str, Any]]
    stream: bool = False
    tools: list[dict[str, Any]] = []
    baton: dict[str, Any] = {}


class Gateway:
    """Admits a run by one commit, tells the engine, and answers with what it hears of it."""

    def __init__(self, database: Database, bus: Bus) -> None:
        self._database, self._bus = database, bus
        self._followed: dict[str, asyncio.Queue[tuple[str, str]]] = {}
        self._numbers = itertools.count(10**25)
        self._conversation = ""
        """The run that has the latest turn of tools. One conversation at a time is measured."""

    async def listen(self) -> None:
        """Give each message to the request that waits for it."""
        async for run, kind, text in self._bus.messages(GATEWAY):
            if run in self._followed:
                self._followed[run].put_nowait((kind, text))

    async def answer(self, request: Request) -> Response:
        """Serve one completion."""
        completion = CompletionRequest.model_validate_json(await request.body())
        resumes = completion.messages[-1]["role"] == "tool"
        run = self._conversation if resumes else _new_run_id(completion, next(self._numbers))
        if completion.tools:
            self._conversation = run
        self._followed[run] = asyncio.Queue()
        if resumes:
            await self._database.read("runs", run)
            await self._database.commit(RESUMED, run)
            self._bus.publish(ENGINE, run, "resumed", "x" * RESUMED.message)
        else:
            await self._database.commit(ADMITTED, run, new_run=True)
            self._bus.add_ticket(run)
        if completion.stream:
            return StreamingResponse(self._pieces(run), media_type="text/event-stream")
        reply = b""
        async for piece in self._pieces(run):
            reply = piece
        return Response(reply, media_type="application/json")

    async def _pieces(self, run: str) -> AsyncIterator[bytes]:
        """Yield what the caller is to read: the deltas, or the whole answer."""
        try:
            while True:
                kind, text = await self._followed[run].get()
                if kind in ("delta", "whole"):
                    yield text.encode()
                if kind == "end":
                    return
        finally:
            del self._followed[run]


def _new_run_id(completion: CompletionRequest, number: int) -> str:
    """Return an id for a new run, which says what the engine is to do: the engine reads no plan."""
    if completion.tools:
        worker = completion.baton["pool"]["pin"]
        return f"tools,{worker},{int(completion.stream)},{number}"
    steps = completion.baton["plan"]["steps"]
    shape = "1-2-1" if len(steps) > 1 else "one"
    return f"{shape},{steps[0]['worker']},{int(completion.stream)},{number}"


class Engine:
    """Carries runs out: reads, calls, commits and tells."""

    def __init__(self, database: Database, bus: Bus, upstream: str) -> None:
        self._database, self._bus, self._upstream = database, bus, upstream
        self._client = async_client(headers={"Content-Type": "application/json", "Authorization": "Bearer bench"})
        self._turns = itertools.count()

    async def take_runs(self, group: asyncio.TaskGroup) -> None:
        """Carry out each new run."""
        async for number, run in self._bus.tickets():
            group.create_task(self._carry_out(number, run))

    async def take_turns(self, group: asyncio.TaskGroup) -> None:
        """Go on with each run that a caller has resumed."""
        async for run, _, _ in self._bus.messages(ENGINE):
            group.create_task(self._resume(run))

    async def _carry_out(self, number: bytes, run: str) -> None:
        shape, worker, stream, _ = run.split(",")
        await self._database.read("runs", run)
        if shape == "1-2-1":
            await self._one_two_one(number, run)
            return
        await self._commit(PLANNED, run, new_steps=["0"])
        self._bus.delete_ticket(number)
        reply = await self._call(run, worker, streams=stream == "1")
        await self._end(AWAITING if shape == "tools" else FINISHED, run, "0", reply)

    async def _one_two_one(self, number: bytes, run: str) -> None:
        await self._commit(PLANNED_1_2_1, run, new_steps=["0"])
        self._bus.delete_ticket(number)
        await self._call(run, "a")
        await self._commit(ENDED_FIRST, run, ended_steps=["0"], new_steps=["1", "2"])
        calls = {"1": asyncio.create_task(self._call(run, "b")), "2": asyncio.create_task(self._call(run, "c"))}
        await calls["1"]
        await self._commit(ENDED_ONE_OF_TWO, run, ended_steps=["1"])
        await calls["2"]
        await self._commit(ENDED_BOTH, run, ended_steps=["2"], new_steps=["3"])
        reply = await self._call(run, "a")
        await self._end(FINISHED, run, "3", reply)

    async def _resume(self, run: str) -> None:
        _, worker, stream, _ = run.split(",")
        turn = f"turn {next(self._turns)}"
        for table in ("contents", "tags", "runs"):  # as many reads as Baton has: the task, the results, the run's row
            await self._database.read(table, run)
        await self._commit(INTENDED, run, new_steps=[turn])
        reply = await self._call(run, worker, streams=stream == "1")
        await self._end(AWAITING, run, turn, reply)

    async def _commit(
        self, what: Commit, run: str, *, new_steps: Sequence[str] = (), ended_steps: Sequence[str] = ()
    ) -> None:
        await self._database.commit(what, run, new_steps=new_steps, ended_steps=ended_steps)
        self._bus.publish(GATEWAY, run, "committed", "x" * what.message)

    async def _end(self, what: Commit, run: str, step: str, reply: str) -> None:
        """Commit the end of the last step, and then let the caller have the answer."""
        await self._database.commit(what, run, ended_steps=[step])
        if reply:
            self._bus.publish(GATEWAY, run, "whole", reply)
        self._bus.publish(GATEWAY, run, "end", "x" * max(what.message - len(reply), 0))

    async def _call(self, run: str, worker: str, *, streams: bool = False) -> str:
        """Call a worker. Return its whole reply, or send what it streams to the gateway and return nothing."""
        body = orjson.dumps({"model": "bench", "stream": streams, "messages": ["x" * WORKER_REQUEST_BYTES]})
        url = f"{self._upstream}{WORKERS[worker]}/v1/chat/completions"
        async with self._client.stream("POST", url, content=body) as response:
            pieces = []
            async for piece in response.aiter_raw():
                if streams:
                    self._bus.publish(GATEWAY, run, "delta", piece.decode())
                else:
                    pieces.append(piece)
        return b"".join(pieces).decode()


async def _connect(database: str, redis_url: str) -> tuple[Database, Bus]:
    settings = {name: str(value) for name, value in BY_KEY.items()}
    writer, reader = [await asyncpg.connect(database, server_settings=settings) for _ in range(2)]
    return Database(writer, reader), Bus(redis_url)


def gateway_app(database: str, redis_url: str) -> FastAPI:
    """Return the gateway's application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway = Gateway(*await _connect(database, redis_url))
        app.add_api_route("/v1/chat/completions", gateway.answer, methods=["POST"], response_model=None)
        listening = asyncio.create_task(gateway.listen())
        yield
        listening.cancel()

    return FastAPI(lifespan=lifespan, openapi_url=None)


async def _engine(database: str, redis_url: str, upstream: str) -> None:
    engine = Engine(*await _connect(database, redis_url), upstream)
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.take_runs(group))
        group.create_task(engine.take_turns(group))


@contextmanager
def stack(upstream: str) -> Iterator[Target]:
    """Run both processes over servers of their own, until the block ends. The target's first process is the gateway."""
    with servers.postgres(fsync=True) as database, servers.redis() as queue:
        asyncio.run(create_tables(database.url))
        port = servers.free_port()
        command = Tree().command("tests.bench.stack", "--database", database.url, "--redis", queue.url)
        gateway = start_process([*command, "--port", str(port)], port=port)
        engine = start_process([*command, "--upstream", upstream], port=None)
        with gateway as first, engine as second:
            target = Target("stack", first.url, (first, second), conducts=True, database=database.url)
            load.run(load.Load(url=target.address(""), body=one_step("fast"), requests=1))  # waits for the engine
            yield target


def main() -> None:
    """The command line: a gateway with `--port`, an engine with `--upstream`."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.stack", description=__doc__)
    parser.add_argument("--database", required=True)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--port", type=int)
    parser.add_argument("--upstream")
    chosen = parser.parse_args()
    if chosen.upstream:
        uvloop.run(_engine(chosen.database, chosen.redis, chosen.upstream))
        return
    uvicorn.run(
        gateway_app(chosen.database, chosen.redis),
        host="127.0.0.1",
        port=chosen.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
