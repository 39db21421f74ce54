"""Conversations as the tests of the store write them: each turn is a run, whose task has all turns before it."""

from msgspec.structs import replace

from app.core.contents import content_ref
from app.core.message.chat import Message, Task, Text, Tool, Toolbox, task_parts
from app.core.run.events import StepDone
from app.store.protocol import Entry, SharedContent, Store
from tests.conformance.entries import SALT, admission_entry

OWNER = "0a" * 32
TOOLS = Toolbox((Tool("look", "Looks something up. " * 40, {"type": "object"}),))


def answer_of_turn(turn: int) -> str:
    return f"Answer {turn}: " + "of some length, " * 30


def task(turns: int, name: str = "", user: str | None = "ann") -> Task:
    """The request of a turn, counted from 1, of the conversation with this name."""
    messages = [Message("system", (Text("Be brief. " * 30),)), Message("user", (Text(f"Question 0{name}?"),))]
    for turn in range(1, turns):
        messages += [
            Message("assistant", (Text(answer_of_turn(turn)),)),
            Message("user", (Text(f"Question {turn}{name}?"),)),
        ]
    return Task(tuple(messages), user=user, toolbox=TOOLS)


def turn(run: str, turns: int, name: str = "", owner: str = OWNER, at: float = 1.0) -> Entry:
    """The admission of a turn."""
    parts = task_parts(task(turns, name))
    ref = content_ref(SALT, parts.whole)
    shared = SharedContent(ref, owner, parts.head, parts.body, parts.tail)
    return replace(admission_entry(run, at), contents=((ref, parts.whole),), shared=shared)


def only_tools(run: str) -> Entry:
    """An admission that shares nothing but the tools."""
    parts = task_parts(Task((), toolbox=TOOLS))
    ref = content_ref(SALT, parts.whole)
    shared = SharedContent(ref, OWNER, parts.head, parts.body, parts.tail)
    return replace(admission_entry(run), contents=((ref, parts.whole),), shared=shared)


def answer(run: str, turns: int) -> Entry:
    """The end of a turn's step."""
    body = answer_of_turn(turns).encode()
    ref = content_ref(SALT, body)
    step_done = StepDone(n=0, call="call", output=ref, chars=len(body), finish="stop")
    return Entry(run, 3.0, (step_done,), epoch=1, contents=((ref, body),))


def contents_of(run: str, turns: int, name: str = "") -> dict[str, bytes]:
    return dict((*turn(run, turns, name).contents, *answer(run, turns).contents))


async def converse(store: Store, turns: int, name: str = "", owner: str = OWNER) -> list[str]:
    """Write the turns of a conversation, each as a run."""
    runs = [f"{name}{number}" for number in range(1, turns + 1)]
    for number, run in enumerate(runs, 1):
        await store.append(turn(run, number, name, owner))
        await store.append(answer(run, number))
    return runs
