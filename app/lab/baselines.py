"""The baselines of a trained conductor: each arm names a plan for every lesson, with the hidden skills known.

The fixed arms are chosen by exhaustion for each pool, with knowledge that no operator has; that makes them strong. The
best fixed plan is the best of all plans of at most four steps, so no constant plan that a trained conductor ends up
with can be better. The optimum is the best plan for each class of tasks: a ceiling that nothing passes. Fixed plans
have the subtasks of `plans.SUBTASKS`; of a conductor that writes words the optimum names each kind of task rightly.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random

from msgspec import Struct

from app.lab import search, world
from app.lab.lessons import Lesson, draw_sensible_plan
from app.lab.plan_grammar import ROLES, WORDS, Form
from app.lab.plans import Plan
from app.lab.subtask_wording import NAMED, PHRASES, SUBJECTS
from app.lab.world import CLASSES, Setting, Weights

FIXED, OPTIMUM = "best fixed plan", "searched optimum"
UNWORDED = "searched optimum in fixed words"
ARMS = (
    "random plan", "random sensible plan", "best single worker", "best planner-executor-checker", "mixture of agents",
    FIXED, OPTIMUM,
)  # fmt: skip


def arm_names(form: Form) -> tuple[str, ...]:
    """Return the names of the arms that a conductor of this form is compared with."""
    if form is not WORDS:
        return ARMS
    return (*ARMS[:-1], UNWORDED, OPTIMUM)


class SearchedArms(Struct, frozen=True):
    """The searched arms of one pool."""

    fixed: Mapping[str, Plan]
    optimum: tuple[Plan, ...]
    tried: int


@lru_cache(256)
def search_arms(setting: Setting) -> SearchedArms:
    """Search this pool."""
    everything = search.search(setting)
    shapes = {"best single worker": _single, "best planner-executor-checker": _chain, "mixture of agents": _mixture}
    fixed = {FIXED: everything.fixed}
    for name, is_of_arm in shapes.items():
        fixed[name] = search.search(setting, only=is_of_arm).fixed
    return SearchedArms(fixed, everything.best, everything.tried)


@lru_cache(256)
def best_named_plans(setting: Setting) -> tuple[Plan, ...]:
    """Return the best plan for each class where every subtask names the right kind of task."""
    pool = [world.shift_skills(worker, NAMED) for worker in setting.pool]
    best = search.search(Setting(tuple(pool), setting.weights)).best
    plans = []
    for plan, (domain, _) in zip(best, CLASSES, strict=True):
        plans.append(_name_subjects(plan, domain))
    return tuple(plans)


def _name_subjects(plan: Plan, domain: int) -> Plan:
    """Return the plan with subtasks in words that name the kind of task of this domain."""
    steps = []
    for step in plan:
        text = PHRASES[step.role][0].format(it=SUBJECTS[domain][0])
        steps.append(step._replace(text=text))
    return tuple(steps)


def _single(shape: search.Shape) -> bool:
    return len(shape) == 1


def _chain(shape: search.Shape) -> bool:
    """Return True for three steps: a plan, an answer by it, and a check of that answer."""
    roles = [role for role, _ in shape]
    accesses = [sees for _, sees in shape]
    return accesses == [(), (0,), (1,)] and roles[0] == "plan" and roles[2] == "check"


def _mixture(shape: search.Shape) -> bool:
    """Return True if all steps but the last answer on their own and the last one combines their answers."""
    *others, (last_role, last_sees) = shape
    for role, sees in others:
        if sees or role not in ("solve", "reason"):
            return False
    return last_role == "combine" and len(last_sees) == len(others)


def plans_of_arm(arm: str, lessons: Sequence[Lesson], weights: Weights, seed: int, form: Form = ROLES) -> list[Plan]:
    """Return the arm's plan for each lesson, over places of its pool."""
    random = Random(seed)
    if arm == "random plan":
        return [_draw_any_plan(random, len(lesson.pool), form) for lesson in lessons]
    if arm == "random sensible plan":
        return [draw_sensible_plan(random, len(lesson.pool)) for lesson in lessons]
    settings = [Setting(lesson.pool, weights) for lesson in lessons]
    if arm not in (OPTIMUM, UNWORDED):
        return [search_arms(setting).fixed[arm] for setting in settings]
    plans = []
    for lesson, setting in zip(lessons, settings, strict=True):
        if arm == OPTIMUM and form is WORDS:
            plan_of_class = best_named_plans(setting)
        else:
            plan_of_class = search_arms(setting).optimum
        plans.append(plan_of_class[CLASSES.index(lesson.problem.kind)])
    return plans


def _draw_any_plan(random: Random, workers: int, form: Form) -> Plan:
    """Return a plan of the grammar whose tokens are drawn at random."""
    tokens, state = [0], form.follow(0, 0)
    while tokens[-1] != 2:
        tokens.append(random.choice(form.legal(state, workers)))
        state = form.follow(state, tokens[-1])
    return form.decode(tokens)
