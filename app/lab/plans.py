"""Plans as a small conductor writes them: worker, role and access list of each step, one token each.

The tokens of a plan, joined, are its text in the form that `proposals.py` reads: a model that emits them speaks the
published grammar. `legal` is that grammar: after any prefix, exactly the tokens with which some valid plan goes on.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from app.conductor.compact import ordinal

STEPS = 4
"""The step limit of the rehearsal worlds."""
SLOTS = 6
"""The most workers of a pool."""
SUBTASKS: Mapping[str, str] = {
    "plan": "Write a plan for the task. Do not solve it.",
    "solve": "Solve the task at once. Give the final answer.",
    "reason": "Solve the task step by step, by the plan if there is one. Give the final answer.",
    "check": "Check the last answer against the task, correct it if it is wrong, and give the final answer.",
    "combine": "Weigh the answers against each other and give one final answer.",
}
ROLES = tuple(SUBTASKS)
ANSWERS_NEEDED: Mapping[str, int] = {"check": 1, "combine": 2}
"""The answers that a step of this role must see."""
START = '{"steps":['
NEXT, END = ",", "]}"


class PlanStep(NamedTuple):
    """A step: the worker's place in the pool, a role, whether it sees the question, which earlier steps it sees, and
    the subtask in words that ask for this role; empty: the role's in `SUBTASKS`."""

    worker: int
    role: str
    user: bool = True
    sees: tuple[int, ...] = ()
    text: str = ""


Plan = tuple[PlanStep, ...]


@cache
def vocabulary() -> tuple[str, ...]:
    """Return every token of a plan, as text: JSON without blanks, as servers write it that decode under a schema."""
    workers = [ordinal(number) for number in range(SLOTS)]
    roles = [f'"subtask":"{words}",' for words in SUBTASKS.values()]
    return (START, NEXT, END, *workers, *roles, *(access_text(user, sees) for user, sees in accesses()))


@cache
def accesses() -> tuple[tuple[bool, tuple[int, ...]], ...]:
    """Return every access list, those that hold no later step first: the last step's choices are all of them."""
    lists = []
    for bits in range(1, 1 << STEPS):
        user = bool(bits & 1)
        sees = tuple([n for n in range(STEPS - 1) if bits >> n + 1 & 1])
        lists.append((user, sees))
    return tuple(lists)


def access_text(user: bool, sees: Sequence[int]) -> str:
    """Return an access list as it ends a step."""
    entries = [str(n) for n in sees]
    if user:
        entries.insert(0, '"user"')
    return f'"access":[{",".join(entries)}]}}'


FIRST_WORKER = 3
FIRST_ROLE = FIRST_WORKER + SLOTS
FIRST_ACCESS = FIRST_ROLE + len(ROLES)
TOKENS = FIRST_ACCESS + (1 << STEPS) - 1
LONGEST = 1 + 4 * STEPS
"""Tokens of the longest plan."""


def legal(place: int, workers: int) -> tuple[int, int] | tuple[int, ...]:
    """Return the tokens that may stand at this place of a plan over so many workers, however it began.

    Place 0 is the start; then four tokens for each step: worker, role, access list, and what comes after.
    """
    if place == 0:
        return (0,)
    step, part = divmod(place - 1, 4)
    if part == 0:
        return tuple(range(FIRST_WORKER, FIRST_WORKER + workers))
    if part == 1:
        return tuple(range(FIRST_ROLE, FIRST_ROLE + len(ROLES)))
    if part == 2:
        return tuple(range(FIRST_ACCESS, FIRST_ACCESS + (1 << step + 1) - 1))
    if step + 1 < STEPS:
        return (1, 2)
    return (2,)


FURTHER = STEPS - 1
"""Steps of a plan of a second round: the answer of the first takes the place of one."""


def legal_again(place: int, workers: int) -> tuple[int, ...]:
    """Return the legal tokens of a second round's plan: it may end at once, which takes the answer for final, and in
    its access lists 0 is that answer, so that its own steps are counted from 1."""
    if place == 1:
        return (2, *legal(1, workers))
    if place > 4 * FURTHER:
        return (2,)
    part = (place - 1) % 4
    if part < 2:
        return legal(place, workers)
    return legal(place + 4, workers)  # what the step sees, and whether the plan ends: as of one step further on


def to_tokens(plan: Plan) -> list[int]:
    """Return a plan's tokens."""
    tokens = [0]
    for step in plan:
        access = accesses().index((step.user, step.sees))
        tokens += [FIRST_WORKER + step.worker, FIRST_ROLE + ROLES.index(step.role), FIRST_ACCESS + access, 1]
    return [*tokens[:-1], 2]


def from_tokens(tokens: Sequence[int]) -> Plan:
    """Return the plan of these tokens, up to the end token. Raises ValueError if they are none."""
    if not tokens or tokens[0] != 0:
        raise ValueError("a plan begins with its start")
    steps: list[PlanStep] = []
    for place in range(1, len(tokens), 4):
        entry = list(tokens[place : place + 4])
        if len(entry) < 4 or any(token not in legal(place + n, SLOTS) for n, token in enumerate(entry)):
            raise ValueError(f"no step begins at token {place}")
        user, sees = accesses()[entry[2] - FIRST_ACCESS]
        steps.append(PlanStep(entry[0] - FIRST_WORKER, ROLES[entry[1] - FIRST_ROLE], user, sees))
        if entry[3] == 2:
            return tuple(steps)
    raise ValueError("the plan has no end")


def to_text(tokens: Sequence[int]) -> str:
    """Return the text that these tokens stand for."""
    return "".join(vocabulary()[token] for token in tokens)


def results_of_steps(plan: Plan) -> list[str]:
    """Return the result of each step: `plan`, `answer`, or `nothing` where it lacks the question or something to work
    on: an answer to check, two to combine."""
    results: list[str] = []
    for step in plan:
        answers = sum([results[n] == "answer" for n in step.sees])
        if not step.user or answers < ANSWERS_NEEDED.get(step.role, 0):
            results.append("nothing")
        elif step.role == "plan":
            results.append("plan")
        else:
            results.append("answer")
    return results


def steps_used(plan: Plan, place: int, yields: Sequence[str]) -> tuple[int, ...]:
    """Return the earlier steps that a step works on: the last plan, the last answer, or all answers, by its role."""
    step = plan[place]
    if yields[place] == "nothing" or step.role == "plan":
        return ()
    needed_result = "answer"
    if step.role in ("solve", "reason"):
        needed_result = "plan"
    usable = tuple([n for n in step.sees if yields[n] == needed_result])
    if step.role == "combine":
        return usable
    return usable[-1:]


def contributing_steps(used: Sequence[tuple[int, ...]], yields: Sequence[str], place: int) -> frozenset[int]:
    """Return the steps that have had a hand in the answer of step `place`, itself included; plans are not answers."""
    steps = frozenset({place})
    for n in used[place]:
        if yields[n] == "answer":
            steps |= contributing_steps(used, yields, n)
    return steps


def shift_by_one_step(step: PlanStep) -> PlanStep:
    """Return the step as it reads in a plan that has one more step at its beginning."""
    return step._replace(sees=tuple([n + 1 for n in step.sees]))


def without_needless_steps(plan: Plan) -> Plan | None:
    """Return the plan without what cannot help: needless access, and steps that the answer does not rest on.

    It is right at least as often, and costs no more; None if the plan can never answer.
    """
    yields = results_of_steps(plan)
    if yields[-1] != "answer":
        return None
    used = [steps_used(plan, place, yields) for place in range(len(plan))]
    needed = {len(plan) - 1}
    for place in reversed(range(len(plan))):
        if place in needed:
            needed |= set(used[place])
    order = sorted(needed)
    moved = {old: new for new, old in enumerate(order)}
    steps = []
    for old in order:
        steps.append(plan[old]._replace(user=True, sees=tuple([moved[n] for n in used[old]])))
    return tuple(steps)
