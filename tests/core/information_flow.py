"""Random runs over random pools, in which every text carries marks of what it was made from.

The caller's words are marks of their labels; a worker's output repeats the marks of everything that it was shown, less
those of the labels that it declassifies. So the composed messages of a call show what was read, whatever the product
derives from the journal. A call that the rules forbid by these marks is a leak.
"""

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from app.core.message.chat import Message, Task, Text, ToolCall, Usage
from app.core.plan.workflow import Access, Step
from app.core.pool.catalog import Catalog, Limits, Worker
from app.core.pool.policy import permits
from app.core.run import drafts
from app.core.run.events import (
    CallFinished,
    CallIntended,
    Fact,
    NamedCall,
    RunAdmitted,
    RunAwaitingTool,
    RunResumed,
    StepAwaitingTool,
    StepDone,
    StepQueued,
    StepSkipped,
    StepToolResults,
)
from app.core.run.fold import apply_facts
from app.core.run.progress import Propose
from app.core.run.state import RunState, Turn
from app.core.run.visibility import (
    EarlierStep,
    LabelFlow,
    ToolUse,
    compose,
    conversation_reading,
    label_refusals,
    reading_of,
    visible_steps,
)

MARK = re.compile(r"\[\[([^\]]+)\]\]")
CALLER, TOOL, CONDUCTOR, STEP = "source:caller", "source:tool", "source:conductor", "source:step"
LABELS = ("record", "secret", "draft", "region:eu")
Allowed = Callable[[Catalog, str, frozenset[str], frozenset[str]], bool]


@dataclass
class Flows:
    """The calls that were made, and those that read what the rules forbid, with the marks that they read."""

    calls: int = 0
    leaks: list[tuple[str, frozenset[str]]] = field(default_factory=list)


def explore(chance: random.Random, runs: int, pool: Callable[[random.Random], Catalog], allowed: Allowed) -> Flows:
    """Make random runs, several over each pool."""
    flows = Flows()
    catalog = pool(chance)
    for number in range(runs):
        catalog = pool(chance) if number % 5 == 0 else catalog
        Run(chance, catalog, allowed, flows).carry_out()
    return flows


def write_marks(*names: Iterable[str]) -> str:
    """A text with these marks."""
    return "".join(f"[[{name}]]" for some in names for name in sorted(some))


def marks(*texts: str) -> frozenset[str]:
    """The marks of the texts."""
    return frozenset(MARK.findall(" ".join(texts)))


def labels(*texts: str) -> frozenset[str]:
    """The marks that are labels."""
    return frozenset(mark for mark in marks(*texts) if not mark.startswith("source:"))


class Run:
    """One run: a plan of the caller's, or up to two rounds of a model's; any eligible worker takes each step."""

    def __init__(self, chance: random.Random, catalog: Catalog, allowed: Allowed, flows: Flows) -> None:
        self.chance, self.catalog, self.allowed, self.flows = chance, catalog, allowed, flows
        self.workers = [catalog.workers[name] for name in chance.choice(list(catalog.tiers.values())).pool]
        own = frozenset(label for label in LABELS if chance.random() < 0.3)
        self.task = Task((Message("user", (Text(write_marks(own, {CALLER})),)),))
        self.texts: dict[str, str] = {"": ""}
        self.used: dict[int, list[ToolUse]] = {}
        admitted = RunAdmitted(
            task="task",
            tier="mini",
            limits=Limits(rounds=2),
            deadline=0.0,
            pool=tuple(worker.name for worker in self.workers),
            conductor="model",
            preview=False,
            rehearsal=False,
            streams=False,
            labels=own,
        )
        self.state = RunState(run="run", admitted=admitted, turn=Turn())

    def carry_out(self) -> None:
        """Plan and execute, as far as the rules let it."""
        model = self.chance.choice((None, *self.workers))
        if model is not None and not permits(model, conversation_reading(self.state)):
            model = None
        for number in range(1 if model is None else 2):
            if not self.plan(number, model):
                return
            for step in self.state.current_steps:
                self.step(step.n)
            if self.state.answer_of_round(number + 1) is None:
                return

    def write(self, *facts: Fact) -> None:
        self.state = apply_facts(self.state, facts)

    def keep(self, text: str) -> str:
        """Keep a text; returns its ref."""
        ref = f"ref{len(self.texts)}" if text else ""
        self.texts[ref] = text
        return ref

    def calls(self, worker: Worker, *texts: str) -> None:
        """Note a call in which a worker reads these texts."""
        self.flows.calls += 1
        labels_read = labels(*texts)
        if not self.allowed(self.catalog, worker.name, labels_read, marks(*texts) - labels_read):
            self.flows.leaks.append((worker.name, marks(*texts)))

    # -- plans

    def plan(self, number: int, model: Worker | None) -> bool:
        """Make a plan; False if a model may not, or if no worker may take one of the steps."""
        base = len(self.state.steps)
        command = Propose(number, base, "first", number + 1)
        self.write(drafts.plan_opened(command, "model", [], instant=model is None))
        before = self.state.answer_of_round(number)
        subtask, lost = "Do it.", frozenset[str]()
        if model is not None:
            reading = LabelFlow(self.state).planner_reading(command.round, None)
            if not permits(model, reading):
                return False
            texts = [self.task.messages[0].text]
            for step in self.state.steps_of_round(number) if before is not None else ():
                texts.append(self.texts[step.subtask])
            if before is not None:
                texts.append(self.texts[before.step.output])
            self.calls(model, *texts)
            subtask = write_marks(labels(*texts) - model.declassifies, {CONDUCTOR})
            lost = reading.labels & model.declassifies
        inputs: list[tuple[int, ...]] = []
        last = self.chance.randrange(4)
        for place in range(last + 1):
            listed = tuple(n for n in range(place) if self.chance.random() < 0.5)
            again = before is not None and self.chance.random() < 0.5
            access = Access(self.chance.random() < 0.4, listed, again)
            text = subtask if self.chance.random() < 0.7 or not access.user else ""
            ref, previous = self.keep(text), before.step.n if before is not None else None
            for worker in self.chance.sample(self.workers, len(self.workers)):
                step = Step(worker.name, text, access, answers=place == last)
                draft = drafts.plan_step(
                    Propose(number, base, "first"), place, drafts.WrittenStep(step, ref, declassified=lost), previous
                )
                if not label_refusals(self.catalog, self.state, [draft]):
                    break
            else:
                return False
            self.write(draft)
            inputs.append(listed)
        self.write(drafts.plan_accepted(number, "", inputs))
        return True

    # -- steps

    def step(self, n: int) -> None:
        """Execute a step with any worker that may read what it reads; it may call a tool first, or be lost."""
        reading = reading_of(self.state, n, self.workers)
        readers = [worker for worker in self.workers if permits(worker, reading)]
        if not readers or self.chance.random() < 0.1:
            self.write(StepSkipped(n, "lost"))
            return
        worker = self.chance.choice(readers)
        if self.state.steps[n].state == "waiting":
            self.write(StepQueued(n))
        step, call = self.state.steps[n], f"call{len(self.state.calls)}"
        self.write(CallIntended(call, n, worker.name, step.access, 0, 0))
        earlier = [self.state.steps[m] for m in step.access.steps if self.state.steps[m].state == "done"]
        earlier_steps = {
            step.n: EarlierStep(step.n, self.texts[step.subtask], self.texts[step.output]) for step in earlier
        }
        task = self.task if step.access.user else None
        visible = visible_steps(step.access, earlier_steps)
        messages = compose(task, self.texts[step.subtask], visible, self.used.get(n, ()), worker.name)
        texts = [message.text for message in messages]
        self.calls(worker, *texts)
        self.write(CallFinished(call, n, "ok", Usage(), 0, 0.0))
        if n not in self.used and self.chance.random() < 0.2:
            self.use_a_tool(n, call, worker, labels(*texts))
            return
        output = write_marks(labels(*texts) - worker.declassifies, {STEP}) if self.chance.random() < 0.9 else ""
        lost = worker.declassifies & reading.labels
        self.write(StepDone(n, call, self.keep(output), len(output), "stop", declassified=lost))

    def use_a_tool(self, n: int, call: str, worker: Worker, labels_read: frozenset[str]) -> None:
        """Let the worker call a tool of the caller's, whose result has labels of its own; then go on."""
        own = frozenset(label for label in LABELS if self.chance.random() < 0.2)
        assistant_turn = Message("assistant", (Text(write_marks(labels_read)),), calls=(ToolCall("theirs", "look"),))
        came = Message("tool", (Text(write_marks(own, {TOOL})),), call_id="ours")
        self.used[n] = [ToolUse(worker.name, assistant_turn, ("ours",), (came,))]
        turn = self.state.turn.number
        self.write(
            StepAwaitingTool(n, call, "said", 0, (NamedCall("ours", "look"),)),
            RunAwaitingTool(turn, 0.0),
            RunResumed(turn + 1, 0.0, streams=False, at=0.0),
            StepToolResults(n, "came", ("ours",), own),
        )
        self.step(n)
