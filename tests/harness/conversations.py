"""A caller with tools, which sends its whole conversation in each turn, and workers that call those tools."""

import json
from dataclasses import dataclass, field
from typing import Any

from app.core.message.chat import Message, Task, Text, Tool, Toolbox, ToolCallCollector, ToolDelta
from app.engine.delivery.messages import FollowedRun
from app.engine.runs.admission import Order
from app.process.wiring import Runtime
from tests.harness.in_process import Outcome, finish, order
from tests.stubs import Reply, ToolCall

LOOK, ADD = Tool("look", "Looks something up."), Tool("add", "Adds numbers.")
TOOLBOX = Toolbox((LOOK, ADD))
QUESTION = Message("user", (Text("What is it?"),))


def tool_call_reply(*calls: ToolCall, words: str = "", **more: Any) -> Reply:
    """Return a worker's reply that calls tools."""
    return Reply(chunks=(words,) if words else (), tool_calls=calls, finish="tool", **more)


def look_call(what: str, id_: str = "") -> ToolCall:
    """Return a call of the tool `look`."""
    return ToolCall("look", json.dumps({"q": what}), id_)


@dataclass
class Conversation:
    """The caller's copy of the conversation."""

    runtime: Runtime
    tier: str = "baton-mini"
    messages: list[Message] = field(default_factory=lambda: [QUESTION])
    toolbox: Toolbox = TOOLBOX
    extra: dict[str, Any] = field(default_factory=dict)

    def order(self, **changes: Any) -> Order:
        """Return the order of the next turn."""
        task = Task(tuple(self.messages), toolbox=self.toolbox)
        return order(self.runtime, self.tier, task=task, **self.extra | changes)

    async def start_turn(self, **changes: Any) -> FollowedRun:
        """Start the next turn."""
        return await self.runtime.runs.start(self.order(**changes))

    async def take_turn(self, **changes: Any) -> Outcome:
        """Start the next turn and read its reply to the end."""
        outcome = await finish(await self.start_turn(**changes))
        assert outcome.ended.error is None, outcome.ended.error
        return outcome

    def add_results(self, outcome: Outcome, *results: str) -> None:
        """Append the reply and these results of its calls."""
        calls = outcome.ended.calls
        words = (Text(outcome.ended.answer),) if outcome.ended.answer else ()
        self.messages.append(Message("assistant", words, calls=calls))
        self.messages += [
            Message("tool", (Text(text),), call_id=call.id) for call, text in zip(calls, results, strict=True)
        ]


def assemble_calls(deltas: list[ToolDelta]) -> list[tuple[str, str, str]]:
    """Return the tool calls that streamed pieces add up to."""
    gathering = ToolCallCollector()
    for delta in deltas:
        gathering.take(delta)
    return [(call.id, call.name, call.arguments) for call in gathering.calls]
