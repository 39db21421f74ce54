"""Rules of a conductor's prompt, evolved: mutation and selection in the manner of GEPA, without a language model.

GEPA (arXiv 2507.19457) has a language model reflect on traces and rewrite a prompt. None is at hand here: this is
a random mutation search over the rules that such a prompt could state. A rule says: if the text has these words, use
this shape, and choose each worker by what cards say (pass rates in a domain or in all, shrunken by their sample sizes,
less an aversion to price, and with or without workers who retain data or whose context is short). The first rule that
fits decides. Like GEPA it keeps every candidate that is best on some task (a Pareto front), draws parents from the
front, and takes a mutant in if it beats its parent on a small batch. Each execution has one verdict.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from app.lab.world2.baselines import Chosen, Setting
from app.lab.world2.constants import DOCUMENT_TOKENS, DOMAINS
from app.lab.world2.shapes import Plan, catalogue
from app.lab.world2.tasks import Task
from app.lab.world2.texts import words
from app.lab.world2.workers import Worker

MOST_RULES = 6
BATCH = 12
FRONT = 48
"""Tasks whose best candidates are kept."""
AVERSIONS = (0.0, 0.02, 0.05, 0.1, 0.2)
"""Pass rate that is given up for each halving of the price."""
SHRINK = 10.0
"""Questions of average result that a card's pass rate counts in addition."""


class Choice(NamedTuple):
    """The terms on which a rule chooses a worker from cards."""

    domain: int | None
    aversion: float
    discreet: bool
    """Avoid workers who retain data."""
    long: bool
    """Avoid workers whose context is shorter than a long document."""


class Rule(NamedTuple):
    """A rule: words that the text must have, a shape, and the choice of who begins and of all others."""

    cues: tuple[str, ...]
    shape: str
    first: Choice
    others: Choice


Rules = tuple[Rule, ...]


class EvolvedRules:
    """The rules that were evolved over the pools of training; they choose by cards, so over any pool."""

    name = "evolved rules"

    def __init__(self, settings: Sequence[Setting], seed: int, executions: int) -> None:
        self.rules = evolved(settings, Random(f"evolution|{seed}"), executions)

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> Chosen:
        """Return the plan of the first rule that fits each task."""
        places = {plan: place for place, plan in enumerate(setting.plans)}
        return np.array([places[decided(self.rules, setting.pool, task)] for task in tasks])


def decided(rules: Rules, pool: Sequence[Worker], task: Task) -> Plan:
    """Return the plan of the first rule that fits; the last rule fits always."""
    text = words(task.text)
    rule = next((rule for rule in rules[:-1] if text.issuperset(rule.cues)), rules[-1])
    return manned(rule, pool)


def manned(rule: Rule, pool: Sequence[Worker]) -> Plan:
    """Return the rule's shape with workers chosen by their cards."""
    steps = catalogue()[rule.shape]
    first, others = _ranked(rule.first, pool)[0], _ranked(rule.others, pool)[0]
    return Plan(rule.shape, tuple(others if place else first for place in range(len(steps))))


def _ranked(choice: Choice, pool: Sequence[Worker]) -> list[int]:
    cheapest = min(worker.price for worker in pool)
    marks = []
    for place, worker in enumerate(pool):
        card = worker.card
        right = card.right[choice.domain] if choice.domain is not None else sum(card.right) / len(card.right)
        rate = (right + 0.6 * SHRINK) / (card.asked + SHRINK)
        mark = rate - choice.aversion * float(np.log2(card.price / cheapest))
        mark -= 1.0 if choice.discreet and card.retains else 0.0
        mark -= 1.0 if choice.long and card.context < DOCUMENT_TOKENS[-1] else 0.0
        marks.append((-mark, place))
    return [place for _, place in sorted(marks)]


def evolved(settings: Sequence[Setting], random: Random, executions: int) -> Rules:
    """Evolve rules with so many executions, and return those with the best mean over the front's tasks."""
    tasks = settings[0].training
    cues = _cues(tasks)
    exam = [(random.choice(settings), random.choice(tasks)) for _ in range(FRONT)]
    root: Rules = (Rule((), "solve", _any_choice(random), _any_choice(random)),)
    candidates = [root]
    marks = [_marks(root, exam, random)]
    left = executions - FRONT
    while left >= 2 * BATCH:
        best = np.array(marks).argmax(axis=0)
        parent = candidates[int(random.choice(best.tolist()))]
        child = mutated(parent, cues, random)
        batch = [(random.choice(settings), random.choice(tasks)) for _ in range(BATCH)]
        left -= 2 * BATCH
        if sum(_marks(child, batch, random)) > sum(_marks(parent, batch, random)) and left >= FRONT:
            candidates.append(child)
            marks.append(_marks(child, exam, random))
            left -= FRONT
    return candidates[int(np.array(marks).mean(axis=1).argmax())]


def _marks(rules: Rules, batch: Sequence[tuple[Setting, Task]], random: Random) -> list[float]:
    """One verdict for each task of a batch, times what a right answer is worth there."""
    found = []
    for setting, task in batch:
        plan = decided(rules, setting.pool, task)
        found.append(setting.sampled(plan, task, random))
    return found


def mutated(rules: Rules, cues: Sequence[str], random: Random) -> Rules:
    """Return the rules with one change: a rule more, one less, or a part of one changed."""
    found = list(rules)
    what = random.random()
    if what < 0.3 and len(found) < MOST_RULES:
        shape = random.choice(sorted(catalogue()))
        rule = Rule((random.choice(cues),), shape, _any_choice(random), _any_choice(random))
        found.insert(random.randrange(len(found)), rule)
    elif what < 0.4 and len(found) > 1:
        del found[random.randrange(len(found) - 1)]
    else:
        place = random.randrange(len(found))
        found[place] = _changed(found[place], cues, random, last=place == len(found) - 1)
    return tuple(found)


def _changed(rule: Rule, cues: Sequence[str], random: Random, *, last: bool) -> Rule:
    part = random.choice(("shape", "first", "others") if last else ("shape", "first", "others", "cues"))
    if part == "shape":
        return rule._replace(shape=random.choice(sorted(catalogue())))
    if part == "cues":
        return rule._replace(cues=(random.choice(cues),))
    if part == "first":
        return rule._replace(first=_any_choice(random))
    return rule._replace(others=_any_choice(random))


def _any_choice(random: Random) -> Choice:
    domain = random.choice((None, *range(len(DOMAINS))))
    return Choice(domain, random.choice(AVERSIONS), random.random() < 0.5, random.random() < 0.5)


def _cues(tasks: Sequence[Task]) -> list[str]:
    """Words and pairs of words that some, but not most, of the texts have."""
    counts: dict[str, int] = {}
    for task in tasks:
        for word in words(task.text):
            counts[word] = counts.get(word, 0) + 1
    return sorted(word for word, count in counts.items() if 0.03 * len(tasks) < count < 0.6 * len(tasks))
