"""The arms of a selector: small workflows, each a template with workers in its places.

    answer ............ one worker answers the conversation as it stands
    reason ............ one worker, step by step
    plan-solve, plan-reason ........ one plans, another answers by the plan
    answer-check, reason-check ..... one answers, another checks and corrects
    plan-reason-check .............. all three
    judge ............. one worker answers twice, another weighs the answers
    mixture ........... three workers answer, another weighs the answers
    model ............. whatever the tier's model plans (its steps are not known beforehand)

In a further round, what can be done with the answer of the round before:

    accept ............ it is the answer
    recheck ........... a checker is shown it, and corrects it
    redo .............. another worker answers the conversation as it stands, without seeing it

Every worker takes the place of the one who answers (`main`). Planners and checkers are those that the pool file names,
else those whose card says that they are good at it, else the most expensive. An arm's name is its template and its
workers in the order of its steps: `plan-reason flint birch`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from app.core.plan.workflow import Access, Step
from app.core.pool.catalog import SelectorSpec, Worker

PLAN = "Write a plan for the task. Do not solve it."
SOLVE = "Solve the task at once, from what was prepared. Give the complete final answer."
REASON = "Solve the task step by step, by the plan if there is one. Give the complete final answer."
CHECK = "Check the last answer against the task, correct it if it is wrong, and give the complete final answer."
WEIGH = "Weigh the answers against each other and give one complete final answer."
MODEL = "model"
"""The arm that leaves the plan to the tier's model."""
ACCEPT, RECHECK, REDO = "accept", "recheck", "redo"
"""The arms of a further round, by the beginnings of their names."""
ANSWERED = "answered"
"""The part of an arm of a further round that looks at the answer of the round before."""
MOST = 256
"""Arms of one tier; beyond, there is too little to learn each from."""
_SUBTASKS: Mapping[str, str] = {
    "answer": "", "plan": PLAN, "solve": SOLVE, "reason": REASON, "check": CHECK, "weigh": WEIGH,
}  # fmt: skip
_PLANS: Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]] = {
    "answer": (("answer", ()),),
    "reason": (("reason", ()),),
    "plan-solve": (("plan", ()), ("solve", (0,))),
    "plan-reason": (("plan", ()), ("reason", (0,))),
    "answer-check": (("answer", ()), ("check", (0,))),
    "reason-check": (("reason", ()), ("check", (0,))),
    "plan-reason-check": (("plan", ()), ("reason", (0,)), ("check", (1,))),
    "judge": (("answer", ()), ("answer", ()), ("weigh", (0, 1))),
    "mixture": (("answer", ()), ("answer", ()), ("answer", ()), ("weigh", (0, 1, 2))),
}
"""Role and seen steps of each step."""
TEMPLATES: Mapping[str, int] = {name: len(plan) for name, plan in _PLANS.items()}
"""The number of steps of each template."""

_AIDS = frozenset({"plan", "check", "weigh"})
"""The roles of workers that help the one who answers."""
PLANNING = ("plan",)
"""A worker is good at planning if one of its card's strengths contains one of these words."""
CHECKING = ("check", "judg", "review")
"""A worker is good at checking if one of its card's strengths contains one of these words."""


class Arm(Struct, frozen=True):
    """One thing that a selector can do."""

    name: str
    template: str
    main: str
    """The worker that answers; for `model`, no particular one."""
    aids: tuple[str, ...]
    """The workers that help, each as `role:worker`."""
    steps: tuple[Step, ...]
    further: tuple[str, ...] = ()
    """Further parts that share its success."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the parts that share its success: the worker that answers, those that help, and the template."""
        return (f"main:{self.main}", *self.aids, f"template:{self.template}", *self.further)


PLANNED = Arm(MODEL, MODEL, MODEL, (), ())
"""The arm that leaves the plan to the tier's model."""


def arms(spec: SelectorSpec, workers: Sequence[Worker], most_steps: int, *, model: bool = False) -> tuple[Arm, ...]:
    """Return the arms over these workers whose steps are not too many, at most `MOST`; `model` says whether the tier's
    model may be asked, whose arm is always among them."""
    arms_by_name: dict[str, Arm] = {}
    for template in spec.templates:
        for arm in _arms_of_template(template, spec, workers, most_steps):
            arms_by_name[arm.name] = arm
    planned = (PLANNED,) if model else ()
    if not arms_by_name and not planned:  # the caller has left fewer steps than any template has
        arms_by_name = {arm.name: arm for arm in _arms_of_template("answer", spec, workers, most_steps)}
    return (*list(arms_by_name.values())[: MOST - len(planned)], *planned)


def count_arms(spec: SelectorSpec, workers: Sequence[Worker], *, model: bool) -> int:
    """Return how many arms these workers make in all, also beyond `MOST`; `model` is as for `arms`."""
    planners = len(find_suitable_workers(workers, spec.planners, PLANNING))
    checkers = len(find_suitable_workers(workers, spec.checkers, CHECKING))
    count = int(model)
    for template in spec.templates:
        roles = {role for role, _ in _PLANS[template]}
        arms_of_template = len(workers)
        if "plan" in roles:
            arms_of_template *= planners
        if not roles.isdisjoint(("check", "weigh")):
            arms_of_template *= checkers
        count += arms_of_template
    return count


def _arms_of_template(template: str, spec: SelectorSpec, workers: Sequence[Worker], most_steps: int) -> Iterator[Arm]:
    """Yield the template with each worker in the place of the one who answers, beside everyone who may help."""
    roles = [role for role, _ in _PLANS[template]]
    if len(roles) > most_steps:
        return
    planners, checkers = [""], [""]
    if "plan" in roles:
        planners = find_suitable_workers(workers, spec.planners, PLANNING)
    if "check" in roles or "weigh" in roles:
        checkers = find_suitable_workers(workers, spec.checkers, CHECKING)
    names = [worker.name for worker in workers]
    for place, name in enumerate(names):
        answering = [name]
        if template == "mixture":
            answering = [*names[place:], *names[:place]]
        for planner, checker in product(planners, checkers):
            yield arm_of_workers(template, _workers_in_roles(roles, planner, checker, answering))


def _workers_in_roles(roles: Sequence[str], planner: str, checker: str, answering: Sequence[str]) -> list[str]:
    """Return a worker for each step: the helper whose role it is, else one of those who answer, in turn."""
    helpers = {"plan": planner, "check": checker, "weigh": checker}
    chosen = []
    for place, role in enumerate(roles):
        if role in helpers:
            chosen.append(helpers[role])
        else:
            chosen.append(answering[place % len(answering)])
    return chosen


def arm_of_workers(template: str, workers: Sequence[str]) -> Arm:
    """Return a template with these workers in the order of its steps. The first who neither plans nor checks is
    `main`."""
    plan = _PLANS[template]
    steps: list[Step] = []
    aids: list[str] = []
    main = ""
    for worker, (role, sees) in zip(workers, plan, strict=True):
        is_last = len(steps) == len(plan) - 1
        steps.append(Step(worker, _SUBTASKS[role], Access(True, sees), answers=is_last))
        if role not in _AIDS and not main:
            main = worker
        if role in _AIDS or worker != main:
            aids.append(f"{role}:{worker}")
    return Arm(f"{template} {' '.join(workers)}", template, main, tuple(aids), tuple(steps))


def arm_named(name: str) -> Arm:
    """Return the arm of this name."""
    template, _, workers = name.partition(" ")
    if template == MODEL:
        return PLANNED
    return arm_of_workers(template, workers.split(" "))


def arm_of(steps: Sequence[tuple[str, str, Access]]) -> Arm:
    """Return the arm whose plan has these steps, each as worker, subtask and access list; `PLANNED` if it is none of
    them."""
    workers = [worker for worker, _, _ in steps]
    planned = [(subtask, access) for _, subtask, access in steps]
    for template, length in TEMPLATES.items():
        if length == len(workers):
            arm = arm_of_workers(template, workers)
            if [(step.subtask, step.access) for step in arm.steps] == planned:
                return arm
    return PLANNED


def list_follow_up_arms(spec: SelectorSpec, workers: Sequence[Worker], first: Arm) -> tuple[Arm, ...]:
    """Return all that can be done with the answer that an arm has given. It is accepted if there is nobody else."""
    checkers = find_suitable_workers(workers, spec.checkers, CHECKING)
    others = [worker.name for worker in workers if (first.template, first.main) != ("answer", worker.name)]
    names = [ACCEPT]
    names += [f"{RECHECK} {checker}" for checker in checkers]
    names += [f"{REDO} {other}" for other in others]
    return tuple([build_follow_up_arm(name, first) for name in names])


def build_follow_up_arm(name: str, first: Arm) -> Arm:
    """Return one of these arms by its name. The chance that an answer is right that is accepted or checked depends on
    whom it is from, and on what it looks like."""
    template, _, worker = name.partition(" ")
    if template == ACCEPT:
        return replace(first, name=ACCEPT, steps=(), further=(ANSWERED,))
    if template == RECHECK:
        step = Step(worker, CHECK, Access(True, (), previous=True), answers=True)
        return Arm(name, RECHECK, first.main, (*first.aids, f"check:{worker}"), (step,), (ANSWERED,))
    return Arm(name, "answer", worker, (), (Step(worker, "", Access(True), answers=True),))


def find_suitable_workers(workers: Sequence[Worker], preferred_names: Sequence[str], marks: Sequence[str]) -> list[str]:
    """Return the names of the workers that may plan, or check: those of `preferred_names` that are there, else those
    with a strength that has one of the marks in it, else the most expensive."""
    names = [worker.name for worker in workers]
    chosen = [name for name in preferred_names if name in names]
    if chosen:
        return chosen
    suited = [worker.name for worker in workers if _mentions(worker.card.strengths, marks)]
    if suited:
        return suited
    dearest = max(workers, key=lambda worker: worker.price.output)
    return [dearest.name]


def _mentions(strengths: Sequence[str], marks: Sequence[str]) -> bool:
    """Return whether one of the strengths contains one of the marks, in any case."""
    folded = [strength.casefold() for strength in strengths]
    return any(mark in strength for strength in folded for mark in marks)
