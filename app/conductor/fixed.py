"""Conductors without a model: the baselines, and the fallback for a model conductor that fails.

single ............. one worker answers the conversation unchanged: no added token, no added call
chain .............. plan -> solve -> check
fan_out ............ several workers answer on their own, one more combines (mixture of agents)
self_consistency ... one worker answers several times, then weighs its own answers
random ............. any valid plan: the lower bound that every other conductor has to exceed
"""

from collections.abc import AsyncIterator, Callable, Mapping
from random import Random

from msgspec.structs import replace

from app.conductor.protocol import Ask, Brief
from app.core.plan.workflow import Access, Step
from app.core.pool.catalog import ConductorSpec

PLAN = "Work out how to solve the task, step by step. Do not solve it yet."
SOLVE = "Solve the task by following the plan. Give the complete final answer."
CHECK = "Check the answer against the task and correct what is wrong. Give the complete final answer and nothing else."
COMBINE = (
    "Several experts have answered the task independently. Weigh their answers against each other, "
    "then give one complete final answer and nothing else."
)

SOLO = ""
"""The subtask of a worker that answers the conversation as it is."""
CHAIN_SUBTASKS = ((SOLO,), (SOLO, CHECK), (PLAN, SOLVE, CHECK))
"""The subtasks of a chain, by the number of steps before its last one."""
CHAIN_WIDTH = 2
"""Steps of a chain before its last one."""
SUBTASKS = (PLAN, SOLVE, CHECK, COMBINE)


class FixedConductor:
    """Proposes one shape over the preferred workers that are eligible, or over all workers if none of them is."""

    instant = True

    def __init__(self, spec: ConductorSpec) -> None:
        self._spec = spec

    async def propose(self, brief: Brief, ask: Ask) -> AsyncIterator[Step]:
        """Yield the shape's steps, cut to the run's step limit. A further round has one step that checks the previous
        answer, or none. `ask` is not used."""
        names = self._names(brief)
        if brief.round > 1:
            if self._spec.again:  # another worker than before, if there is one
                yield Step(names[(brief.round - 1) % len(names)], CHECK, Access(True, (), previous=True), answers=True)
            return
        *before, last = SHAPES[self._spec.shape](names, self._width(brief))
        for step in before:
            yield step
        yield replace(last, answers=True)

    def _names(self, brief: Brief) -> list[str]:
        eligible = [worker.name for worker in brief.workers]
        preferred = [name for name in self._spec.workers if name in eligible]
        return preferred or eligible

    def _width(self, brief: Brief) -> int:
        """Return the number of steps that the shape may have before its last one."""
        width = self._spec.width
        if self._spec.shape == "chain":
            width = CHAIN_WIDTH
        return min(width, brief.limits.steps - 1)


def _single(names: list[str], _width: int) -> list[Step]:
    return [Step(names[0])]


def _chain(names: list[str], width: int) -> list[Step]:
    steps: list[Step] = []
    for place, subtask in enumerate(CHAIN_SUBTASKS[width]):
        worker = names[place % len(names)]
        steps.append(Step(worker, subtask, Access(True, tuple(range(place)))))
    return steps


def _fan_out(names: list[str], width: int) -> list[Step]:
    if not width:
        return _single(names, width)
    branches = [Step(names[place % len(names)]) for place in range(width)]
    return [*branches, Step(names[0], COMBINE, Access(True, tuple(range(width))))]


def _self_consistency(names: list[str], width: int) -> list[Step]:
    return _fan_out(names[:1], width)


SHAPES: Mapping[str, Callable[[list[str], int], list[Step]]] = {
    "single": _single,
    "chain": _chain,
    "fan_out": _fan_out,
    "self_consistency": _self_consistency,
}


CONVERSATION = -1
"""The entry that stands for the conversation where an access list is drawn; the others are the numbers of steps."""


class RandomConductor:
    """Draws length, workers, subtasks and access lists at random, seeded by the run's id. Lengths are equally
    likely."""

    instant = True

    async def propose(self, brief: Brief, ask: Ask) -> AsyncIterator[Step]:
        """Yield a plan in the first round; further rounds accept its answer. `ask` is not used."""
        if brief.round > 1:
            return
        random = Random(brief.run)
        last = random.randrange(brief.limits.steps)
        for place in range(last + 1):
            entries = [entry for entry in range(CONVERSATION, place) if random.random() < 0.5]
            if not entries:
                entries = [random.randrange(CONVERSATION, place)]
            steps = tuple([entry for entry in entries if entry != CONVERSATION])
            yield Step(
                random.choice(brief.workers).name,
                random.choice(SUBTASKS),
                Access(CONVERSATION in entries, steps),
                answers=place == last,
            )
