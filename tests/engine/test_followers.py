"""Followers of a run while an attempt at its answer is being lost: whatever arrives in whatever order, callers get the
answer, and nobody is sent words of an attempt of which it is known here that it was lost.

The engines' messages come over the queue of one process; the journal is a list.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import permutations
from types import SimpleNamespace
from typing import cast

import orjson
import pytest
from msgspec.structs import replace

from app.conductor.protocol import Policy
from app.core.contents import content_ref
from app.core.message.chat import Message, Task, Text, ToolCall, ToolDelta, Usage, message_to_json
from app.core.run.caller_view import Position
from app.core.run.events import (
    CallFinished,
    CallIntended,
    Event,
    Fact,
    Kind,
    NamedCall,
    RunAwaitingTool,
    StepAwaitingTool,
    StepDone,
    StepToolResults,
)
from app.core.run.fold import fold
from app.core.run.identifiers import NO_TRACE
from app.engine.calls.attempt import Reply
from app.engine.commit.run_writer import RunSnapshot
from app.engine.context import EngineContext
from app.engine.delivery.followers import Audience, Follower
from app.engine.delivery.messages import AnswerPart, CallerMessage, Mailbox, StepEvent, TurnEnd
from app.engine.runs.client import RunClient
from app.engine.runs.driver import Driver
from app.engine.runs.registry import Drivers
from app.engine.steps.claimed_step import ClaimedStep, Relay
from app.engine.steps.dispatcher import Dispatcher
from app.errors import Conflict, EventMalformed, StoreUnavailable
from app.network.tracing import Span
from app.stepqueue.memory import MemoryQueue
from app.stepqueue.protocol import CommittedEvents, Delta, ListenRequest, Live, Ticket
from app.store.protocol import Journal, RunRow
from app.telemetry import Telemetry
from tests.core.play import resume
from tests.harness.raw_facts import fact_from_json
from tests.harness.stand_ins import TEXTS, journal_of, row_of
from tests.harness.waiting import until

RUN, SALT, HOME = "run", b"salt", "gateway"
ANSWER = "Vier mal fünf."
OUTPUT = content_ref(SALT, ANSWER.encode())
BEFORE = journal_of(RUN, TEXTS)[:11]
"""Up to the intent of `call_1`, the first attempt at the answer."""


def intend_call(call: str) -> Fact:
    (first,) = [event.fact for event in BEFORE if isinstance(event.fact, CallIntended) and event.fact.call == "call_1"]
    return fact_from_json(Kind.CALL_INTENDED, first.to_json() | {"call": call, "attempt": 2})


def finish_call(call: str, outcome: str) -> CallFinished:
    return CallFinished(call=call, n=1, outcome=outcome, usage=Usage(1, 0, 1, 0), usd=1, seconds=0.1)


def journal_events(*drafts: Fact, after: int) -> tuple[Event, ...]:
    return tuple(Event.of(RUN, seq, 1e9, draft) for seq, draft in enumerate(drafts, after + 1))


LOSS = journal_events(finish_call("call_1", "unknown"), intend_call("call_2"), after=len(BEFORE))
"""Another engine has taken the step."""
SUCCESS = fact_from_json(Kind.SUCCEEDED, {"step": 1, "usd": 100, "answer": OUTPUT, "finish": "stop"})
DONE = StepDone(n=1, output=OUTPUT, chars=len(ANSWER), finish="stop", call="call_2")
END = journal_events(finish_call("call_2", "ok"), DONE, SUCCESS, after=LOSS[-1].seq)

LOST_WORDS = (Delta(RUN, 1, "call_1", 0, "Fünf "), Delta(RUN, 1, "call_1", 5, "mal"))
WORDS = Delta(RUN, 1, "call_2", 0, "Vier mal ")
OF_THE_LOSS = CommittedEvents(RUN, LOSS, engine="heir", epoch=2)
OF_THE_END = CommittedEvents(RUN, END, contents=((OUTPUT, ANSWER),), engine="heir", epoch=2)


CALLING = Message("assistant", (Text("Mal sehen."),), calls=(ToolCall("id", "look", "{}"),))
SAID = orjson.dumps(message_to_json(CALLING)).decode()
CALLS = content_ref(SALT, SAID.encode())
FIRST_TURN = journal_events(
    finish_call("call_1", "ok"),
    StepAwaitingTool(1, "call_1", CALLS, len("Mal sehen."), (NamedCall("id", "look"),)),
    RunAwaitingTool(turn=0, until=2e9),
    after=len(BEFORE),
)
SECOND_TURN = journal_events(
    resume(1, 2e9), StepToolResults(1, "results", ("id",)), intend_call("call_2"), after=FIRST_TURN[-1].seq
)
"""Its caller has sent the results to another gateway."""


class ListStore:
    """A journal of which a part is committed, and the run's row. What happens while one of them is read is played by
    `meanwhile`, once."""

    def __init__(self) -> None:
        self.meanwhile: dict[str, Callable[[], Awaitable[object]]] = {}
        self.committed: tuple[Event, ...] = BEFORE
        self.driver = "heir"
        self.server_changes = 0
        self.lookups = 0

    def of_tenant(self, _tenant: str | None) -> "ListStore":
        return self

    async def journal(self, _run: str, upto: int | None = None, after: int = 0) -> Journal:
        events = tuple(event for event in self.committed if event.seq > after)
        await self.meanwhile.pop("the journal is read", nothing)()
        return Journal(SALT, events)

    async def contents(self, _run: str, refs: Sequence[str]) -> Mapping[str, bytes]:
        return {ref: {OUTPUT: ANSWER, CALLS: SAID}[ref].encode() for ref in refs}

    async def last_seqs(self, _runs: Sequence[str]) -> Mapping[str, int]:
        return {RUN: self.committed[-1].seq}

    async def run(self, run: str) -> RunRow:
        self.lookups += 1
        row = row_of(run, "acme", driver=self.driver, seq=self.committed[-1].seq)
        await self.meanwhile.pop("the run's row is read", nothing)()
        return row


async def nothing() -> None:
    """Nothing happens."""


class Caller:
    """A caller, and what it was sent."""

    def __init__(self, line: Mailbox[CallerMessage]) -> None:
        self.line = line

    @property
    def words(self) -> str:
        return "".join(item.text for item in self.line._items if isinstance(item, AnswerPart))

    @property
    def events(self) -> list[str]:
        """The kinds of the events of steps."""
        return [item.kind for item in self.line._items if isinstance(item, StepEvent)]

    @property
    def error(self) -> str | None:
        last = self.line._items[-1]
        assert isinstance(last, TurnEnd)
        return last.error.public_code if last.error is not None else None


class Gateway:
    """The followers of one process, which receive what is published to it."""

    def __init__(self, client: RunClient, store: ListStore, queue: MemoryQueue) -> None:
        self.client, self.followers, self.store, self.queue = client, client._followers, store, queue

    def follow(self) -> Follower:
        return self.followers.follow(fold(self.store.committed), SALT, Audience(RUN))

    async def join(self, at: Position = Position()) -> Caller:
        return Caller((await self.client.attach(RUN, at, tenant=None)).mailbox)

    async def receive(self, message: Live) -> None:
        await self.queue.publish(HOME, [message])
        await self.settled()

    async def receive_unread(self, message: Live) -> None:
        """Receive a message while the journal cannot be read yet."""
        await self.queue.publish(HOME, [message])

    async def end(self) -> None:
        """The run ends, and its engine sends that to those who follow it by now."""
        self.store.committed = (*BEFORE, *LOSS, *END)
        await self.queue.publish(HOME, [OF_THE_LOSS, OF_THE_END])

    async def ended(self) -> None:
        """Nobody is followed any more."""
        while len(self.followers):  # noqa: ASYNC110 - an engine answers within few turns of the loop
            await asyncio.sleep(0)

    async def settled(self) -> None:
        """All journals that were to be read have been read."""
        while self.followers._catching_up:  # noqa: ASYNC110 - the journal is at hand
            await asyncio.sleep(0)


@asynccontextmanager
async def gateway() -> AsyncIterator[Gateway]:
    store, queue = ListStore(), MemoryQueue(["mini"])
    parts = {"store": store, "queue": queue, "telemetry": Telemetry(), "monotonic": lambda: 0.0}
    client = RunClient(cast(EngineContext, SimpleNamespace(**parts)), home=HOME, bound=9, waiting_bound=9)
    here = Gateway(client, store, queue)
    async with queue.subscribe(HOME, here.followers.receive), asyncio.TaskGroup() as group:
        here.followers.open(group)
        yield here


@asynccontextmanager
async def engine(here: Gateway) -> AsyncIterator[tuple[Drivers, Driver]]:
    """An engine that the run's row names, and a driver that it may use."""
    health = SimpleNamespace(note_journaled=lambda *_seen: None)
    parts = {"store": here.store, "queue": here.queue, "telemetry": Telemetry(), "health": health}
    context = cast(EngineContext, SimpleNamespace(**parts, monotonic=lambda: 0.0, now=lambda: 1e9))
    drivers = Drivers(context, home="heir", bound=9)
    driver = Driver(
        context,
        home="heir",
        run=RunSnapshot(fold(BEFORE), SALT, epoch=1),
        task=Task(()),
        conductor=cast(Policy, None),
        steps=None,
        span=Span(NO_TRACE),
    )
    async with here.queue.subscribe("heir", drivers.receive), asyncio.TaskGroup() as group:
        drivers._group = group
        yield drivers, driver


async def play_to_callers(messages: Sequence[Live], joins: int, lost: str) -> list[tuple[Caller, bool, str]]:
    """Two callers, of whom one joins before the message of that number: each with whether its process could know of the
    loss when it came, and what it had been sent before the end."""
    async with gateway() as here:
        here.store.committed = (*BEFORE, *LOSS) if lost == "at first" else BEFORE
        callers = [(await here.join(), lost == "at first")]
        for place, message in enumerate((*messages, OF_THE_END)):
            if place == joins:
                if lost == "before another joins":
                    here.store.committed = (*BEFORE, *LOSS)
                callers.append((await here.join(), len(here.store.committed) > len(BEFORE)))
            if message is OF_THE_END:
                here.store.committed = (*BEFORE, *LOSS, *END)
                stories = [(caller, knew, caller.words) for caller, knew in callers]
            elif message not in LOST_WORDS:
                here.store.committed = (*BEFORE, *LOSS)
            await here.receive(message)
    return stories


@pytest.mark.parametrize("lost", ["at first", "before another joins", "by what is received"])
@pytest.mark.long
async def test_in_every_order_of_messages_callers_get_the_answer_or_are_told_why_not(lost: str) -> None:
    """`lost` says when the loss is journaled at the latest; messages about it may come at any time from then on."""
    for messages in permutations([*LOST_WORDS, WORDS, OF_THE_LOSS]):
        for joins in range(len(messages) + 1):
            for caller, knew, streamed in await play_to_callers(messages, joins, lost):
                stranded = streamed.startswith("F")
                assert not (stranded and knew), (messages, joins)
                expected = (streamed, "answer_changed") if stranded else (ANSWER, None)
                assert (caller.words, caller.error) == expected, (messages, joins)


async def test_a_turn_that_ends_while_somebody_joins_ends_for_them_as_well() -> None:
    """Its end was sent to those who were there, and nobody is followed any more when the journal has been read."""
    async with gateway() as here:
        first = await here.join()
        here.store.meanwhile["the journal is read"] = here.end
        second = await here.join()
        await here.settled()
    assert [(caller_view.words, caller_view.error) for caller_view in (first, second)] == [(ANSWER, None)] * 2


async def test_an_event_that_comes_while_somebody_joins_is_sent_to_them_as_well() -> None:
    """It is not among those of the journal as it was read, and was sent to those who were there."""
    wanted = BEFORE[0].fact.to_json() | {"wire": {"format": "chat", "steps": True}}
    async with gateway() as here:
        here.store.committed = (Event.of(RUN, 1, 1e9, fact_from_json(Kind.ADMITTED, wanted)), *BEFORE[1:])
        first = await here.join()

        async def lose() -> None:
            here.store.committed += LOSS
            await here.queue.publish(HOME, [OF_THE_LOSS])

        here.store.meanwhile["the journal is read"] = lose
        second = await here.join()
        assert first.events.count("call.intended") == 3
        assert second.events == first.events
        await here.end()
        await here.ended()


async def test_a_run_that_cannot_be_read_after_a_failover_ends_for_its_callers_alone() -> None:
    """A newer release may have written to it, on the server to which the database has moved."""
    async with gateway() as here:
        caller = await here.join()
        here.store.server_changes = 1
        here.store.meanwhile["the journal is read"] = unreadable
        await here.followers._look(healthy=True)
        assert caller.error == "record_damaged"
        assert len(here.followers) == 0


async def test_an_engine_that_has_gone_on_to_other_runs_says_so() -> None:
    """The run ends after its row was read, which named the engine: nobody here was sent the end."""
    async with gateway() as here, engine(here) as (drivers, _):

        async def end() -> None:
            here.store.committed = (*BEFORE, *LOSS, *END)

        here.store.meanwhile["the run's row is read"] = end
        caller = await here.join()
        assert len(drivers) == 0
        await here.ended()
    assert (caller.words, caller.error) == (ANSWER, None)


async def test_a_turn_that_ends_while_its_engine_is_asked_ends_for_who_asks() -> None:
    """The engine has sent the events to others when it learns that somebody else wants them."""
    async with gateway() as here, engine(here) as (drivers, driver):
        drivers._drivers[RUN] = driver
        here.store.committed = (*BEFORE, *LOSS, *END)
        await driver.writer.receive((*LOSS, *END))
        follower = here.followers.follow(fold(BEFORE), SALT, audience := Audience(RUN))
        audience.admit(line := Mailbox[CallerMessage](9))
        follower.engine, follower.engine_answers = "heir", True
        await here.followers.ask(follower)
        await here.ended()
        caller = Caller(line)
    assert (caller.words, caller.error) == (ANSWER, None)


async def test_who_asks_an_engine_that_is_up_to_date_reads_nothing() -> None:
    """The engine answers with an event that is known."""
    async with gateway() as here, engine(here) as (drivers, driver):
        drivers._drivers[RUN] = driver
        await here.join()
        await driver._publish_events(BEFORE[-1:])
        del here.store.committed  # from here on nothing can be read
        await driver.listen(ListenRequest(RUN, HOME))
        follower = here.followers.follower_of(RUN)
        assert follower is not None
        assert follower.engine_answers
        assert not here.followers._catching_up
        here.followers.forget(follower)


@pytest.mark.parametrize("outage", [False, True])
async def test_callers_of_a_turn_get_its_reply_although_the_next_one_is_followed_by_then(outage: bool) -> None:
    """A caller sent the results to another gateway before this one had received the calls."""
    async with gateway() as here:
        first = await here.join()
        here.store.committed = (*BEFORE, *FIRST_TURN, *SECOND_TURN)
        second = await here.join()
        if outage:
            here.store.meanwhile["the journal is read"] = unavailable
        await here.settled()
        await here.followers._look(healthy=True)
        await here.settled()
        assert (first.words, first.error) == ("Mal sehen.", None)
        after = SECOND_TURN[-1].seq
        end = journal_events(finish_call("call_2", "ok"), DONE, SUCCESS, after=after)
        here.store.committed += end
        await here.receive(CommittedEvents(RUN, end, contents=((OUTPUT, ANSWER),)))
        assert (second.words, second.error) == (ANSWER, None)
        assert not here.followers._former


async def test_a_turn_that_begins_while_somebody_joins_the_one_before_is_followed_on() -> None:
    async with gateway() as here:

        async def begin() -> None:
            here.store.committed = (*BEFORE, *FIRST_TURN, *SECOND_TURN)
            present.append(await here.join())

        present: list[Caller] = []
        here.store.meanwhile["the journal is read"] = begin
        first = Caller((await here.client.attach(RUN, tenant=None, turn=0)).mailbox)
        assert (first.words, first.error) == ("Mal sehen.", None)
        follower = here.followers.follower_of(RUN)
        assert follower is not None
        assert follower.state.turn.number == 1
        assert len(follower.audience) == 1
        here.followers.forget(follower)


async def test_text_of_an_earlier_turn_that_comes_late_is_sent_to_nobody() -> None:
    """The engine that executed the earlier turn's step stood still after its commit; others went on with the run."""
    async with gateway() as here:
        here.store.committed = (*BEFORE, *FIRST_TURN, *SECOND_TURN)
        caller = await here.join()
        await here.receive(Delta(RUN, 1, "call_1", 0, "Mal sehen.", calls=(ToolDelta(0, "id", "look", "{}"),)))
        await here.receive(WORDS)
        assert caller.words == "Vier mal "
        end = journal_events(finish_call("call_2", "ok"), DONE, SUCCESS, after=SECOND_TURN[-1].seq)
        here.store.committed += end
        await here.receive(CommittedEvents(RUN, end, contents=((OUTPUT, ANSWER),)))
    assert (caller.words, caller.error) == (ANSWER, None)


async def test_a_follower_reads_on_for_itself_and_not_for_its_successor() -> None:
    """One whose caller has left still reads its journal while another caller comes."""
    async with gateway() as here:
        former, goes_on = here.follow(), asyncio.Event()
        here.store.meanwhile["the journal is read"] = goes_on.wait
        here.followers.catch_up(former)
        await asyncio.sleep(0)
        here.followers.forget(former)
        second = await here.join()
        here.store.committed = (*BEFORE, *LOSS, *END)
        await here.receive_unread(CommittedEvents(RUN, END[-1:]))
        goes_on.set()
        await here.settled()
    assert (second.words, second.error) == (ANSWER, None)


async def unreadable() -> None:
    """A newer release has written an event."""
    raise EventMalformed(RUN, 12)


async def unavailable() -> None:
    """The database is away."""
    raise StoreUnavailable


async def test_a_caller_whose_words_were_lost_goes_on_if_the_answer_begins_with_them() -> None:
    async with gateway() as here:
        caller = await here.join()
        await here.receive(Delta(RUN, 1, "call_1", 0, "Vier "))
        assert caller.words == "Vier "
        here.store.committed = (*BEFORE, *LOSS)
        await here.receive(OF_THE_LOSS)
        new = await here.join()
        assert new.words == ""
        with pytest.raises(Conflict):
            await here.join(Position(1, 2))
        await here.receive(OF_THE_END)
    assert [(follower.words, follower.error) for follower in (caller, new)] == [(ANSWER, None)] * 2


async def test_words_that_were_missed_are_asked_for_again() -> None:
    """Also by the gateway that the run's admission names, to which everything is sent without its asking."""
    async with gateway() as here:
        requests: list[Live] = []
        follower = here.follow()
        follower.state = replace(follower.state, turn=replace(follower.state.turn, gateway=HOME))
        follower.engine = "heir"
        async with here.queue.subscribe("heir", requests.append):
            await here.receive(LOST_WORDS[0])
            await here.followers._look(healthy=True)
            assert requests == []
            await here.receive(Delta(RUN, 1, "call_1", 9, "acht"))
            await here.followers._look(healthy=True)
            assert requests == [ListenRequest(RUN, HOME, "call_1", len(LOST_WORDS[0].text))]
            await here.receive(Delta(RUN, 1, "call_1", 0, "Fünf mal acht"))
            await here.followers._look(healthy=True)
        assert len(requests) == 1
        here.followers.forget(follower)


async def test_an_engine_that_does_not_answer_is_asked_for_its_successor() -> None:
    """An engine was killed whose messages were received here; the run's row names the one that goes on."""
    async with gateway() as here:
        dead: list[Live] = []
        heir: list[Live] = []
        follower = here.follow()
        async with here.queue.subscribe("dead", dead.append), here.queue.subscribe("heir", heir.append):
            await here.receive(CommittedEvents(RUN, (), engine="dead", epoch=1))
            for _ in range(2):
                await here.followers._look(healthy=True)
            assert (dead, heir) == ([ListenRequest(RUN, HOME)], [ListenRequest(RUN, HOME)])
            await here.receive(OF_THE_LOSS)
            await here.followers._look(healthy=True)
            assert (len(heir), here.store.lookups) == (2, 1), (
                "an engine that answers is asked without a look at the row"
            )
        here.followers.forget(follower)


async def test_what_is_sent_again_has_all_that_was_sent_meanwhile() -> None:
    """A worker says more between somebody's wish to listen and the answer to it."""
    async with gateway() as here:
        caller = await here.join()
        reply = cast(Reply, SimpleNamespace(text="", tokens_since=lambda _after: (), refuses=False))
        relay = Relay(RUN, 1, "call_1", reply, lambda _place: "")
        relay._chars, reply.text = 5, "Fünf "  # type: ignore[misc]
        messages: list[Live] = []
        context = SimpleNamespace(store=here.store, queue=here.queue, telemetry=Telemetry(), monotonic=lambda: 0.0)
        engine = cast(EngineContext, context)
        dispatcher = Dispatcher(engine, Drivers(engine, home="heir", bound=1), name="heir", slots=1, grace=0.0)
        work = ClaimedStep(Ticket(RUN, 1, "mini", "heir", 1), relay=relay)
        dispatcher._claimed[RUN, 1] = work
        async with asyncio.TaskGroup() as group:
            dispatcher._group = group
            assert dispatcher.listen(ListenRequest(RUN, HOME))
            reply.text = "Fünf mal"  # type: ignore[misc]
            relay._chars = 8
            await here.receive(LOST_WORDS[1])
            async with here.queue.subscribe("elsewhere", messages.append):
                dispatcher.listen(ListenRequest(RUN, "elsewhere", "call_1", 5))
                dispatcher.listen(ListenRequest(RUN, "elsewhere", "call_1", 8))
                dispatcher.listen(ListenRequest(RUN, "elsewhere", "call_0", 8))
                await until(lambda: len(messages) > 1)
        assert caller.words == "Fünf mal"
        assert messages == [Delta(RUN, 1, "call_1", 5, "mal"), Delta(RUN, 1, "call_1", 0, "Fünf mal")], (
            "no more than it lacks"
        )


@pytest.mark.parametrize(("is_new", "expected"), [(True, 1.0), (False, 0.0)])
async def test_the_first_words_of_an_admitted_run_are_timed_once(is_new: bool, expected: float) -> None:
    """Also if their attempt is lost; and nobody knows here when a run was admitted that was begun elsewhere."""
    async with gateway() as here:
        follower = here.followers.follow(fold(BEFORE), SALT, Audience(RUN), is_new=is_new)
        here.store.committed = (*BEFORE, *LOSS)
        for message in (*LOST_WORDS, OF_THE_LOSS, WORDS):
            await here.receive(message)
        assert follower.audience.text == "Vier mal "
        here.followers.forget(follower)
        registry = here.client._context.telemetry.registry
    counted = registry.get_sample_value("baton_first_delta_seconds_count", {"tier": "baton-mini"}) or 0.0
    assert counted == expected
