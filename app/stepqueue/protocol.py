"""The protocol of the queue: tickets to dispatchers, live messages to the drivers of runs.

Everything here is lossy by contract. A lost or repeated ticket does no harm: the outbox in the database is the record,
a sweeper queues overdue tickets again, and a claim is fenced in the database. A lost message does no harm either: the
journal has the event, and the finished text has what a lost delta held.

An *address* is a process: a driver receives the messages of its runs under its own address, and every dispatcher
receives those to the address `DISPATCHERS`. `subscribe` calls a plain function for each message, which must not block.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from app.core.message.chat import Decoded, ToolDelta
from app.core.run.events import Event
from app.core.run.identifiers import NO_TRACE, Trace

DISPATCHERS = "dispatchers"
AGAIN = -1
"""The version of a ticket that is not delivered for the first time: no row has it, so whoever takes the ticket looks at
the row, and claims it before doing anything else."""
WHOLE_RUN = -1
"""The step of a ticket for a run that nobody drives: whoever takes it drives the run."""


@dataclass(slots=True)
class SealKeys:
    """The keys of live messages, at most 64 bytes each, which all processes share. The first one seals what is sent,
    and what is sealed with any of them is accepted. They may be replaced while the queue is open. Without any, messages
    of every client of the server are accepted."""

    keys: tuple[bytes, ...] = ()


class Ticket(Struct, frozen=True):
    """One step of one run, or a run that nobody drives (`WHOLE_RUN`): ids only. `version` is the outbox row's when it
    was written, or `AGAIN`; `seq` is the journal's then."""

    run: str
    step: int
    tier: str
    driver: str
    """The address that receives the messages of this step."""
    seq: int
    version: int = 0
    receipt: str = ""
    """The queue's own identifier of one delivery, which `keep` and `done` take."""
    trace: Trace = NO_TRACE
    """The span of the run's engine, whose trace the step continues. None where the ticket was written without it, and
    when it comes again, since that engine may be gone, and its span with it."""
    at: float = 0.0
    """When the step was queued, in seconds since 1970; 0 where that is not known."""
    tenant: str = ""
    """The tenant of the run, which takes turns with others. It is read when the ticket is queued, and need not come
    with a delivery."""


class CommittedEvents(Struct, frozen=True):
    """Events that were committed to a run, in the order of their numbers."""

    run: str
    events: tuple[Event, ...]
    contents: Sequence[tuple[str, str]] = ()
    """Texts that were committed with the events, by their refs, which prove them."""
    engine: str = ""
    """The address of the run's engine, if that is the sender."""
    epoch: int = 0
    """The epoch of the run's row then; 0 if the sender does not know it."""


class Delta(Struct, frozen=True):
    """Text and tool calls of a step as they stream; `offset` counts the characters of this attempt before them, `since`
    the pieces of tool calls."""

    run: str
    step: int
    call: str
    offset: int
    text: str
    logprobs: tuple[Decoded, ...] = ()
    """Log-probabilities of the tokens of `text`, where the caller requested them."""
    since: int = 0
    calls: tuple[ToolDelta, ...] = ()
    """Under the ids that the caller is given."""


class Stop(Struct, frozen=True):
    """The run's driver wants its running steps, or one of them, to stop now."""

    run: str
    step: int | None = None


class ListenRequest(Struct, frozen=True):
    """The gateway at `address` follows this run: send it the run's events, and what it lacks of the answer.

    It is sent to the run's engine, again every second; the engine passes it on to those who execute its steps.
    """

    run: str
    address: str
    call: str = ""
    """The call of which it has something; empty for none, or where the engine may be one of an older release."""
    chars: int = 0
    """The number of characters that it has of the call's text."""
    calls: int = 0
    """The number of pieces of tool calls that it has of the call."""


class EngineChange(Struct, frozen=True):
    """The run has a new engine, at `address`: steps that are being executed report to it from now on."""

    run: str
    address: str


Live = CommittedEvents | Delta | Stop | ListenRequest | EngineChange


class StepQueue(Protocol):
    """Six verbs, two for its own life, and two words on how it is."""

    @property
    def healthy(self) -> bool:
        """False while tickets or messages may not get through, as far as is known: then look into the database instead
        of waiting for them. Asking costs nothing."""
        ...

    @property
    def crowded(self) -> bool:
        """Return True if runs wait that nobody has taken yet, as far as is known: a new one must not overtake them.
        Asking costs nothing."""
        ...

    async def enqueue(self, tickets: Sequence[Ticket]) -> None:
        """Make tickets known to dispatchers. Returns when they are in the queue; never waits for a dispatcher."""
        ...

    async def take(self, slots: int, wait: float, *, runs: bool = True) -> list[Ticket]:
        """At most `slots` tickets, higher tiers first as configured; [] after `wait` seconds without one. Without
        `runs`, those of whole runs are left to others.

        Of the tickets of a tier that wait, each tenant in turn has one taken, its oldest: with n tenants a ticket that
        is its tenant's first to wait is among the next n that are taken, however many another tenant has.

        A ticket whose lease has expired comes with the version `AGAIN`.
        """
        ...

    async def keep(self, tickets: Sequence[Ticket]) -> None:
        """Renew the delivery of tickets that are being worked on, so that nobody else is given them."""
        ...

    async def done(self, tickets: Sequence[Ticket]) -> None:
        """Forget deliveries: the step is finished, or the database said that it is not ours."""
        ...

    async def publish(self, address: str, messages: Sequence[Live]) -> None:
        """Send live messages to an address, in order; they are lost if nobody is subscribed, or if the server fails.

        They are on their way when this returns.
        """
        ...

    def subscribe(self, address: str, sink: Callable[[Live], None]) -> AbstractAsyncContextManager[None]:
        """While inside, call `sink` for each message to `address`. Returns once messages are sure to arrive.

        Where the server is away it returns too, within its time, and hearing begins when the server comes.
        """
        ...

    async def ready(self) -> None:
        """Return if the queue answers within two seconds, else raise `QueueUnavailable`."""
        ...

    async def close(self) -> None:
        """Let go of connections and reader tasks."""
        ...
