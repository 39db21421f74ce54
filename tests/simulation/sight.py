"""Checks what each call was shown against what its step was granted, token by token."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tests.simulation.case import Case
from tests.simulation.witness import Fact

TOKEN = re.compile(r"<(?:user|out|sub|evil|tool):[^<>]*>")


def steps_see_what_is_granted(case: Case) -> Iterator[str]:
    """A token is in a step's request if and only if it was granted to it; a planning call sees its task, and of answers
    that of the round before it."""
    if case.order is None or case.erased:  # what was written after an erasure nobody has
        return
    sight = Sight(case)
    for call in case.received:
        intent = sight.intents[call.request]
        tokens = _tokens(json.loads(call.body)[2].__repr__())
        if intent.body["n"] is not None:
            n = intent.body["n"]
            if tokens != (expected := sight.of_step(n) | sight.transcript(n, intent.seq)):
                yield f"step {n} saw {sorted(tokens)}, was granted {sorted(expected)}"
        elif (parent := sight.parents[intent.seq]) is not None:
            if _words(tokens) != _words(sight.of_step(parent)):
                yield f"planning for step {parent} saw {sorted(tokens)}, was granted {sorted(sight.of_step(parent))}"
        elif _words(tokens) - sight.task - sight.answers or not sight.task <= tokens:
            yield f"the conductor saw {sorted(tokens)}"


@dataclass
class Sight:
    """The texts that can be seen in a run."""

    case: Case
    steps: dict[int, dict[str, Any]] = field(init=False)
    outputs: dict[int, str] = field(init=False)
    intents: dict[str, Fact] = field(init=False)
    parents: dict[int, int | None] = field(init=False)
    """For which step the plan is, that an intent of a planning call is for."""

    def __post_init__(self) -> None:
        case = self.case
        self.steps = {body["n"]: body for body in case.bodies("plan.step")}
        self.outputs = {body["n"]: case.texts.get(body["output"], "") for body in reversed(case.bodies("step.done"))}
        self.intents, self.parents = {}, {}
        parent = None
        for fact in case.facts:
            if fact.kind == "plan.opened":
                parent = fact.body.get("parent")
            elif fact.kind == "call.intended":
                self.intents[fact.body["request"]] = fact
                self.parents[fact.seq] = parent

    @cached_property
    def task(self) -> set[str]:
        """Return the caller's words, and the answers that it received before."""
        messages = self.case.order.task.messages if self.case.order is not None else ()
        return {token for message in messages for token in _tokens(message.text)}

    @cached_property
    def answers(self) -> set[str]:
        """Return the answers of a round: the last step's, or, where that is empty, any other."""
        own = {n: text for n, text in self.outputs.items() if self.steps[n].get("parent") is None}
        finals = [n for n in own if self.steps[n]["answers"]]
        final_steps = [n for n in finals if own[n]] if all(own[n] for n in finals) else list(own)
        return {token for n in final_steps for token in _tokens(own[n])}

    def of_step(self, n: int) -> set[str]:
        """Return what a step is granted: its subtask, what its access list names, and its parent's part if it inherits
        it."""
        step = self.steps[n]
        granted = _tokens(self.case.texts.get(step["subtask"], ""))
        granted |= self.task if "user" in step["access"] else set()
        for m in step["access"]:
            if m != "user" and self.outputs.get(m):
                granted |= _tokens(self.outputs[m] + self.case.texts.get(self.steps[m]["subtask"], ""))
        return granted | (self.of_step(step["parent"]) if step.get("inherits") else set())

    def transcript(self, n: int, seq: int) -> set[str]:
        """Return what a step has said with its calls of the caller's tools before an event, and what came back."""
        tokens: set[str] = set()
        answer_ref = ""
        for fact in self.case.facts[: seq - 1]:
            if fact.body.get("n") == n and fact.kind == "step.awaiting_tool":
                answer_ref = fact.body["said"]
            elif fact.body.get("n") == n and fact.kind == "step.tool_results":
                tokens |= _tokens(self.case.texts.get(answer_ref, "") + self.case.texts.get(fact.body["results"], ""))
        return tokens


def _tokens(text: str) -> set[str]:
    return set(TOKEN.findall(text))


def _words(tokens: set[str]) -> set[str]:
    """Without those of subtasks, which a conductor is shown of a plan that it is to mend."""
    return {token for token in tokens if not token.startswith("<sub")}
