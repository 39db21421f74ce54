"""A plan carried out by the executor's pure core: its fold decides, its composer writes what each worker is shown.

With `again` there is a second round: from the first answer it names the steps of another plan; none takes the answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from msgspec.structs import replace

from app.core.message.chat import Message, Task, Text, Usage
from app.core.plan.workflow import Access, Step, Workflow
from app.core.pool.catalog import Limits
from app.core.run import drafts
from app.core.run.events import CallFinished, CallIntended, Event, Fact, RunAdmitted, StepDone, StepQueued
from app.core.run.fold import advance, begin
from app.core.run.progress import Finish, Propose, Queue, Skip, decide
from app.core.run.state import RunState
from app.core.run.visibility import EarlierStep, compose, visible_steps
from app.lab.plans import SUBTASKS, Plan
from app.lab.workers import Reply, final_answer, reply
from app.lab.world import Pool, seconds, usd
from app.providers.rehearsal.task_families import Problem
from tests.harness.ends import end_of


def to_workflow(plan: Plan, names: Sequence[str]) -> Workflow:
    """Return the plan as the executor knows it, over workers of these names."""
    steps = []
    for step in plan:
        subtask = step.text or SUBTASKS[step.role]
        steps.append(Step(names[step.worker], subtask, Access(step.user, step.sees)))
    return Workflow((*steps[:-1], replace(steps[-1], answers=True)))


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run: if it was right, its dollars, and seconds on the critical path."""

    right: bool
    usd: float
    seconds: float


class Stage:
    """One run."""

    def __init__(
        self, plan: Plan, pool: Pool, problem: Problem, seed: str, again: Callable[[str], Sequence[Step]] | None = None
    ) -> None:
        self._again = again
        self._steps = list(to_workflow(plan, [worker.name for worker in pool]).steps)
        self._workers = {worker.name: worker for worker in pool}
        self._task = Task((Message("user", (Text(problem.text),)),))
        self._answer, self._seed = problem.answer, seed
        self._done: dict[int, EarlierStep] = {}
        self._replies: dict[int, Reply] = {}
        self._ends: dict[int, float] = {}
        self._seq = count(1)
        self._state: RunState = begin(self._event(self._admission()))

    def play(self) -> RunResult:
        """To the end."""
        while not self._state.ended:
            for command in decide(self._state, 0.0):
                self._obey(command)
        answering = end_of(self._state).step
        answer = self._replies[answering].text if answering is not None else ""
        dollars = sum(
            usd(self._workers[self._steps[n].worker], reply.input_tokens, reply.output_tokens)
            for n, reply in self._replies.items()
        )
        return RunResult(final_answer(answer) == self._answer, dollars, max(self._ends.values()))

    def _obey(self, command: Any) -> None:
        match command:
            case Propose():
                self._write(drafts.plan_opened(command, "fixed", list(self._workers), instant=True))
                before = self._state.answer_of_round(command.round - 1)
                if before is not None and self._again is not None:
                    self._steps += self._again(self._replies[before.step.n].text)
                steps = self._steps[command.base :]
                for place, step in enumerate(steps):
                    previous = before.step.n if before is not None else None
                    written = drafts.WrittenStep(step, step.subtask)
                    self._write(drafts.plan_step(command, place, written, previous))
                self._write(drafts.plan_accepted(command.number, "", [step.access.steps for step in steps]))
            case Queue():
                for n in command.steps:
                    self._write(StepQueued(n))
                    self._work(n)
            case Skip():
                self._write(*drafts.steps_skipped([self._state.steps[command.step]], "inputs_lost"))
            case Finish():
                self._write(drafts.run_ended(self._state, command))

    def _work(self, n: int) -> None:
        step = self._state.steps[n]
        visible = visible_steps(step.access, self._done)
        messages = compose(self._task if step.access.user else None, step.subtask, visible)
        worker = self._workers[step.worker]
        answer = reply(worker, messages, f"{self._seed}|{n}")
        call, usage = f"call-{n}", Usage(input=answer.input_tokens, output=answer.output_tokens)
        self._write(CallIntended(call, n, worker.name, step.access, usd_held=9, tokens_held=9))
        self._write(
            CallFinished(call, n, "ok", usage, usd=0, seconds=0.0),
            StepDone(n, call, output=call, chars=len(answer.text), finish="stop"),
        )
        self._replies[n], self._done[n] = answer, EarlierStep(n, step.subtask, answer.text)
        self._ends[n] = max((self._ends[k] for k in step.access.steps), default=0.0) + seconds(
            worker, answer.output_tokens
        )

    def _write(self, *written: Fact) -> None:
        for draft in written:
            self._state = advance(self._state, self._event(draft))

    def _event(self, draft: Fact) -> Event:
        return Event.of("run", next(self._seq), 0.0, draft)

    def _admission(self) -> Fact:
        return RunAdmitted(
            task="task",
            tier="mini",
            limits=Limits(rounds=2 if self._again is not None else 1),
            deadline=1_000.0,
            pool=tuple(self._workers),
            conductor="fixed",
            preview=False,
            rehearsal=True,
            streams=False,
        )
