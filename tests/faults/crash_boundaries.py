"""Wrappers of store, queue and providers that tell `CrashPoints` of each call and otherwise change nothing.

    append.before .after      one entry, around its commit; labels: each KIND and KIND@STEP, move=VERB, worker=NAME
    take.after                tickets were taken; labels: step=N of each
    ring.before .after        tickets are told to dispatchers; labels: step=N
    done.before .after        a delivery is forgotten; labels: step=N
    tell.before .after        live messages; labels: delta, committed, stop, listen; worker=NAME of a call
    hear.after                a live message was heard; labels as for tell
    stream.before             a provider is about to be called: nothing is sent yet; labels: worker=NAME
    stream.headers            the reply's status line and headers are here; labels: worker=NAME
    stream.read               the network gave a piece of the reply; labels: worker=NAME
    stream.piece              pieces of the answer are about to be passed on; labels: worker=NAME
    stream.last               the whole answer is here, and nobody has heard of its end

A boundary inside an await is as exact as one process can make it: SIGKILL takes effect before the call returns.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from msgspec import Struct

from app.core.message.chat import Piece
from app.core.run.events import Kind
from app.process.wiring import Pool
from app.providers import http
from app.providers.protocol import Deadlines, Provider, Request
from app.stepqueue.protocol import CommittedEvents, Live, StepQueue, Ticket
from app.store.protocol import AppendResult, Entry, Store
from tests.faults.crash_points import CrashPoints


class CrashingStore:
    """A store whose commits are boundaries."""

    def __init__(self, store: Store, crashes: CrashPoints) -> None:
        self._store, self._crashes = store, crashes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def append(self, entry: Entry) -> AppendResult:
        labels = _labels(entry)
        self._crashes.pass_by("append.before", *labels)
        appended = await self._store.append(entry)
        self._crashes.pass_by("append.after", *labels)
        return appended


def _labels(entry: Entry) -> set[str]:
    labels: set[str] = {f"move={entry.move.verb}"} if entry.move else set()
    for draft in entry.events:
        kind, body = draft.kind.value, draft.to_json()
        labels |= {kind, f"{kind}@{body.get('n')}"}
        if draft.kind is Kind.CALL_INTENDED:
            labels.add(f"worker={body['worker']}")
    return labels


class CrashingQueue:
    """A queue whose verbs are boundaries, and which can stutter: everything sent so many times, in another order."""

    def __init__(self, queue: StepQueue, crashes: CrashPoints, copies: int) -> None:
        self._queue, self._crashes, self._copies = queue, crashes, copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    async def enqueue(self, tickets: Sequence[Ticket]) -> None:
        self._crashes.pass_by("ring.before", *_steps(tickets))
        await self._queue.enqueue(self._repeat_messages(tickets))
        self._crashes.pass_by("ring.after", *_steps(tickets))

    async def take(self, slots: int, wait: float, *, runs: bool = True) -> list[Ticket]:
        tickets = await self._queue.take(slots, wait, runs=runs)
        if tickets:
            self._crashes.pass_by("take.after", *_steps(tickets))
        return tickets

    async def done(self, tickets: Sequence[Ticket]) -> None:
        self._crashes.pass_by("done.before", *_steps(tickets))
        await self._queue.done(tickets)
        self._crashes.pass_by("done.after", *_steps(tickets))

    async def publish(self, address: str, messages: Sequence[Live]) -> None:
        labels = {label for message in messages for label in _describe_message(message)}
        self._crashes.pass_by("tell.before", *labels)
        await self._queue.publish(address, self._repeat_messages(messages))
        publisher = getattr(self._queue, "_publisher", None)  # the queue within a process delivers at once
        if publisher is not None:
            await publisher.idle.wait()  # until then it waits to be published
        self._crashes.pass_by("tell.after", *labels)

    def subscribe(self, address: str, sink: Callable[[Live], None]) -> AbstractAsyncContextManager[None]:
        def receive(message: Live) -> None:
            sink(message)
            self._crashes.pass_by("hear.after", *_describe_message(message))

        return self._queue.subscribe(address, receive)

    def _repeat_messages(self, messages: Sequence[Any]) -> list[Any]:
        """As it is; or each thing so many times and, where there are several, the last one first."""
        return list(reversed(messages)) * self._copies if self._copies > 1 else list(messages)


def _describe_message(message: Live) -> set[str]:
    events = message.events if isinstance(message, CommittedEvents) else ()
    called = {f"worker={event.body['worker']}" for event in events if event.kind is Kind.CALL_INTENDED}
    return {type(message).__name__.lower(), *(event.kind.value for event in events), *called}


def _steps(tickets: Sequence[Ticket]) -> set[str]:
    return {f"step={ticket.step}" for ticket in tickets}


class CrashingProvider(Struct, frozen=True):
    """A provider whose stream is full of boundaries."""

    provider: Provider
    crashes: CrashPoints

    @property
    def unsupported(self) -> frozenset[str]:
        return self.provider.unsupported

    def render(self, request: Request) -> bytes:
        return self.provider.render(request)

    async def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        worker = f"worker={request.worker.name}"
        self.crashes.pass_by("stream.before", worker)
        async for pieces in self.provider.stream(request, body, deadlines):
            self.crashes.pass_by("stream.piece", worker)
            yield pieces
        self.crashes.pass_by("stream.last", worker)


def crashing_pool(crashes: CrashPoints) -> type[Pool]:
    """Return a `Pool` whose providers crash where an order says so."""

    class DoomedPool(Pool):
        def provider(self, name: str) -> Provider:
            return CrashingProvider(super().provider(name), crashes)

    return DoomedPool


def crashing_call(crashes: CrashPoints) -> type[http.Call]:
    """Return a provider's call on the wire, with boundaries where bytes come."""

    class DoomedCall(http.Call):
        async def __aenter__(self) -> "DoomedCall":
            await super().__aenter__()
            crashes.pass_by("stream.headers", f"worker={self._sender.split()[0]}")
            return self

        async def read(self, *, answered: bool = False) -> bytes:
            data = await super().read(answered=answered)
            if data:
                crashes.pass_by("stream.read", f"worker={self._sender.split()[0]}")
            return data

    return DoomedCall
