"""The prompt of a conductor, evolved by GEPA (arXiv 2507.19457; the package `gepa`) from verdicts on executed plans.

The prompt is a list of rules in words, and the conductor follows the first one that fits: if the task has these words,
use this shape, and choose each worker by what cards say (pass rates in a domain or in all, shrunken by their sample
sizes, less an aversion to price, and with or without workers who retain data or whose context is short). There is no
language model here, so two parts are no models: who follows the prompt is a program that reads such sentences and no
others, and what reflects on a small batch of traces is a handful of templates (`reflect_on_traces`). All else is
GEPA's own: the batches, the acceptance of a new prompt that does better on its batch, the front of prompts that are
best on some task of the validation set, and the choice of parents from that front. Each execution has one verdict.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from random import Random
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gepa.api import optimize
from gepa.core.adapter import EvaluationBatch, GEPAAdapter
from gepa.core.result import GEPAResult
from gepa.core.state import GEPAState

from app.lab.world2.baselines import PlanIndices, Setting
from app.lab.world2.constants import DOCUMENT_TOKENS, DOMAINS
from app.lab.world2.rules import size_of
from app.lab.world2.shapes import Plan, catalogue
from app.lab.world2.tasks import Task
from app.lab.world2.texts import words_and_pairs
from app.lab.world2.workers import Worker

PoolTask: TypeAlias = tuple[Setting, Task]
Trace: TypeAlias = Mapping[str, Any]
"""Of one execution: the task, the rule that decided, the score, and what else can be said."""
MOST_RULES = 12
BATCH = 48
VALIDATION = 120
"""Pairs of pool and task on which every prompt that is taken in is executed once."""
AVERSIONS = (0.0, 0.02, 0.05, 0.1, 0.2)
"""Pass rate that is given up for each halving of the price."""
SHRINK = 10.0
"""Questions of average result that a card's pass rate counts in addition."""
FROM_SUCCESS, NEW_RULE, DROP_RULE = 0.3, 0.4, 0.2
"""Of reflections: the share from a task that went well although another did not, of new rules, and of rules dropped."""
RETAINED, SHORT = (
    "A worker who retains data read a confidential task.",
    "A worker's context was too short for the task.",
)
FINAL_SHARE, FINALISTS = 0.25, 8
"""The share of executions that is kept for the end, when the best prompts by validation are judged once more: the best
one of many by one verdict a task is mostly a lucky one."""
PROMPT = "rules"
"""The one part of the prompt that evolves."""
RULE = re.compile(
    r'(?:If the task says "(?P<cue>[^"]*)"|Else), use the shape "(?P<shape>[^"]*)"\.'
    r" Begin with (?P<first>[^.]*)\. Leave the rest to (?P<others>[^.]*)\."
)
CHOICE = re.compile(
    r"the worker who is best in (?P<domain>\w+), at (?P<aversion>\d+) of 100 answers for each halving of the price"
    r"(?P<discreet>, who retains nothing)?(?P<long>, who can read long documents)?"
)
ANY = "all"


class Choice(NamedTuple):
    """The terms on which a rule chooses a worker from cards."""

    domain: int | None
    aversion: float
    discreet: bool
    """Avoid workers who retain data."""
    long: bool
    """Avoid workers whose context is shorter than a long document."""

    def words(self) -> str:
        """Return the sentence's part that states it."""
        domain = ANY if self.domain is None else DOMAINS[self.domain]
        answers = round(100 * self.aversion)
        sentence = f"the worker who is best in {domain}, at {answers} of 100 answers for each halving of the price"
        if self.discreet:
            sentence += ", who retains nothing"
        if self.long:
            sentence += ", who can read long documents"
        return sentence


class Rule(NamedTuple):
    """A rule: a word or two that the text must have (none: it fits always), a shape, and the choice of who begins and
    of all others."""

    cue: str
    shape: str
    first: Choice
    others: Choice

    def words(self) -> str:
        """Return the rule as two or three sentences."""
        begin = "Else"
        if self.cue:
            begin = f'If the task says "{self.cue}"'
        return (
            f'{begin}, use the shape "{self.shape}". Begin with {self.first.words()}. '
            f"Leave the rest to {self.others.words()}."
        )


Rules = tuple[Rule, ...]
BEST = Choice(domain=None, aversion=0.0, discreet=False, long=False)
FIRST = Rule("", "reason", BEST, BEST)
"""The prompt that evolution begins with: the best worker alone."""


class EvolvedPrompt:
    """The prompt that was evolved over the pools of training; it chooses by cards, so over any pool."""

    def __init__(self, settings: Sequence[Setting], seed: int, executions: int) -> None:
        self.name = name_evolved_prompt(executions)
        self.rules = evolve_prompt(settings, seed, executions)

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> PlanIndices:
        """Return the plan of the first rule that fits each task."""
        places = {plan: place for place, plan in enumerate(setting.plans)}
        chosen = []
        for task in tasks:
            _, plan = decide(self.rules, setting.pool, task)
            chosen.append(places[plan])
        return np.array(chosen)


def name_evolved_prompt(executions: int) -> str:
    """Return the name of the row."""
    return f"evolved prompt (GEPA), {executions:,} verdicts"


def evolve_prompt(settings: Sequence[Setting], seed: int, executions: int) -> Rules:
    """Evolve a prompt with at most so many executions, and return the rules of the one that did best on validation."""
    random = Random(f"evolution|{seed}")
    training = list(product(settings, settings[0].training))
    held_out = list(product(settings, settings[0].validation))
    final_budget = int(FINAL_SHARE * executions)
    search_budget = executions - final_budget - 2 * BATCH - VALIDATION

    def is_budget_spent(gepa_state: GEPAState[Any, Any]) -> bool:
        return gepa_state.total_num_evals > search_budget

    adapter = ConductorAdapter(settings[0].training, random)
    result: GEPAResult[Plan, int] = optimize(
        seed_candidate={PROMPT: write_prompt((FIRST,))},
        trainset=training,
        valset=random.sample(held_out, min(VALIDATION, len(held_out))),
        adapter=adapter,
        custom_candidate_proposer=adapter.reflect,
        reflection_minibatch_size=BATCH,
        stop_callbacks=is_budget_spent,
        logger=_NoLogger(),
        track_best_outputs=False,
        seed=seed,
    )
    finalists = sorted(range(len(result.candidates)), key=lambda place: -result.val_aggregate_scores[place])[:FINALISTS]
    exam = random.choices(held_out, k=final_budget // len(finalists))
    marks = [sum(adapter.evaluate(exam, result.candidates[place]).scores) for place in finalists]
    return parse_prompt(result.candidates[finalists[marks.index(max(marks))]][PROMPT])


class ConductorAdapter(GEPAAdapter[PoolTask, Trace, Plan]):
    """The adapter for GEPA: it executes a prompt's plans, gives their traces, and asks for a new prompt upon these."""

    def __init__(self, tasks: Sequence[Task], random: Random) -> None:
        self._cues, self._random = _cues(tasks), random

    def evaluate(
        self, batch: list[PoolTask], candidate: dict[str, str], capture_traces: bool = False
    ) -> EvaluationBatch[Trace, Plan]:
        """Execute one plan for each task. The score is what a right answer is worth there, if the judge passes it."""
        rules = parse_prompt(candidate[PROMPT])
        traces: list[Trace] = []
        plans = []
        for setting, task in batch:
            place, plan = decide(rules, setting.pool, task)
            score = setting.sample_reward(plan, task, self._random)
            feedback = _feedback(setting, task, plan)
            traces.append({"task": task.text, "rule": place, "score": score, "feedback": feedback})
            plans.append(plan)
        return EvaluationBatch(plans, [trace["score"] for trace in traces], traces if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: EvaluationBatch[Trace, Plan], components_to_update: list[str]
    ) -> Mapping[str, Sequence[Trace]]:
        """Return the traces as they are."""
        return dict.fromkeys(components_to_update, eval_batch.trajectories or [])

    def reflect(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Trace]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """Return the prompt after one reflection."""
        rules = reflect_on_traces(parse_prompt(candidate[PROMPT]), reflective_dataset[PROMPT], self._cues, self._random)
        return {PROMPT: write_prompt(rules)}


def _feedback(setting: Setting, task: Task, plan: Plan) -> str:
    """Return what can be said of a plan for a task beyond its verdict, of those who were shown the task itself."""
    remarks = []
    for step, place in zip(catalogue()[plan.shape], plan.workers, strict=True):
        card = setting.pool[place].card
        if step.user and card.retains and task.confidential:
            remarks.append(RETAINED)
        if step.user and card.context < size_of(task).tokens:
            remarks.append(SHORT)
    return " ".join(dict.fromkeys(remarks))


def reflect_on_traces(rules: Rules, traces: Sequence[Trace], cues: Sequence[str], random: Random) -> Rules:
    """Return the rules with one lesson from a batch: mostly from a task that went wrong, else from one that went well.

    What the feedback names is mended first: a reader who retains data, or whose context is too short. After a wrong
    answer else, the plan is made another one: by the rule that decided, or by a new rule before it, for words that this
    task has and none that went well. After a right answer it is asked whether the same can be had for less.
    """
    went_well = [trace for trace in traces if trace["score"] > 0]
    went_wrong = [trace for trace in traces if trace["score"] <= 0]
    cheaper = not went_wrong or (bool(went_well) and random.random() < FROM_SUCCESS)
    cases = went_wrong
    if cheaper:
        cases = went_well
    case = random.choice(cases)
    place = int(case["rule"])
    rule = rules[place]
    if cheaper:
        return _replace_rule(rules, place, _make_cheaper(rule, random))
    changed = _apply_feedback(rule, case["feedback"], random) or _mutate(rule, random)
    elsewhere = set[str]().union(*[words_and_pairs(trace["task"]) for trace in went_well])
    distinctive = sorted((words_and_pairs(case["task"]) - elsewhere).intersection(cues))
    if distinctive and len(rules) < MOST_RULES and random.random() < NEW_RULE:
        return (*rules[:place], changed._replace(cue=random.choice(distinctive)), *rules[place:])
    if rule.cue and random.random() < DROP_RULE:
        return (*rules[:place], *rules[place + 1 :])
    return _replace_rule(rules, place, changed)


def _apply_feedback(rule: Rule, feedback: str, random: Random) -> Rule | None:
    """Return the rule without what the feedback names; None where it names nothing that can be mended so."""
    changes = []
    if RETAINED in feedback and not (rule.first.discreet and rule.others.discreet):
        changes.append(
            rule._replace(first=rule.first._replace(discreet=True), others=rule.others._replace(discreet=True))
        )
    if SHORT in feedback and not (rule.first.long and rule.others.long):
        changes.append(rule._replace(first=rule.first._replace(long=True), others=rule.others._replace(long=True)))
    if not changes or random.random() < 0.5:
        return None
    return random.choice(changes)


def write_prompt(rules: Rules) -> str:
    """Return the prompt that states these rules."""
    return "\n".join([rule.words() for rule in rules])


def parse_prompt(prompt: str) -> Rules:
    """Return the rules that a prompt states, as the conductor understands them."""
    rules = []
    for match in RULE.finditer(prompt):
        rules.append(
            Rule(match["cue"] or "", match["shape"], _parse_choice(match["first"]), _parse_choice(match["others"]))
        )
    return tuple(rules)


def decide(rules: Rules, pool: Sequence[Worker], task: Task) -> tuple[int, Plan]:
    """Return the place and the plan of the first rule that fits; the last rule fits always."""
    text = words_and_pairs(task.text)
    place = 0
    while place < len(rules) - 1 and rules[place].cue not in text:
        place += 1
    return place, assign_workers(rules[place], pool)


def assign_workers(rule: Rule, pool: Sequence[Worker]) -> Plan:
    """Return the rule's shape with workers chosen by their cards."""
    steps = catalogue()[rule.shape]
    first, other = _best_worker(rule.first, pool), _best_worker(rule.others, pool)
    return Plan(rule.shape, (first, *[other] * (len(steps) - 1)))


def _best_worker(choice: Choice, pool: Sequence[Worker]) -> int:
    """Return the place of the worker who is best by the terms of a choice, of several the first."""
    cheapest = min([worker.price for worker in pool])
    marks = []
    for worker in pool:
        card = worker.card
        right = sum(card.right) / len(card.right)
        if choice.domain is not None:
            right = card.right[choice.domain]
        rate = (right + 0.6 * SHRINK) / (card.questions + SHRINK)
        mark = rate - choice.aversion * float(np.log2(card.price / cheapest))
        if choice.discreet and card.retains:
            mark -= 1.0
        if choice.long and card.context < DOCUMENT_TOKENS[-1]:
            mark -= 1.0
        marks.append(mark)
    return marks.index(max(marks))


def _replace_rule(rules: Rules, place: int, rule: Rule) -> Rules:
    return (*rules[:place], rule, *rules[place + 1 :])


def _mutate(rule: Rule, random: Random) -> Rule:
    part = random.choice(("shape", "shape", "first", "others"))
    if part == "shape":
        return rule._replace(shape=random.choice(_similar_shapes(rule.shape)))
    if part == "first":
        return rule._replace(first=_draw_choice(random))
    return rule._replace(others=_draw_choice(random))


@cache
def _similar_shapes(shape: str) -> Sequence[str]:
    """Return the shapes that differ from this one by at most two steps more or fewer, or by thinking or not."""
    own, shapes = _roles(shape), []
    for name in sorted(catalogue()):
        other = _roles(name)
        if name != shape and sum(((own - other) + (other - own)).values()) <= 2:
            shapes.append(name)
    return shapes


def _roles(shape: str) -> Counter[str]:
    return Counter(shape.replace("+", " ").split())


def _make_cheaper(rule: Rule, random: Random) -> Rule:
    steps = len(catalogue()[rule.shape])
    shorter = [name for name, shape in sorted(catalogue().items()) if len(shape) < steps]
    if shorter and random.random() < 0.5:
        return rule._replace(shape=random.choice(shorter))
    if random.random() < 0.5:
        return rule._replace(first=_raise_aversion(rule.first))
    return rule._replace(others=_raise_aversion(rule.others))


def _raise_aversion(choice: Choice) -> Choice:
    more = [aversion for aversion in AVERSIONS if aversion > choice.aversion]
    return choice._replace(aversion=min(more, default=choice.aversion))


def _draw_choice(random: Random) -> Choice:
    domain = random.choice((None, *range(len(DOMAINS))))
    return Choice(domain, random.choice(AVERSIONS), random.random() < 0.5, random.random() < 0.5)


def _parse_choice(text: str) -> Choice:
    match = CHOICE.fullmatch(text)
    if not match:
        raise ValueError(f"no choice of a worker: {text}")
    domain = None
    if match["domain"] != ANY:
        domain = DOMAINS.index(match["domain"])
    return Choice(domain, int(match["aversion"]) / 100, bool(match["discreet"]), bool(match["long"]))


def _cues(tasks: Sequence[Task]) -> list[str]:
    """Return words and pairs of words that some, but not most, of the texts have."""
    counts: dict[str, int] = {}
    for task in tasks:
        for word in words_and_pairs(task.text):
            counts[word] = counts.get(word, 0) + 1
    least, most = 0.03 * len(tasks), 0.6 * len(tasks)
    return sorted([word for word, count in counts.items() if least < count < most])


class _NoLogger:
    """GEPA's log, of which nothing is kept."""

    def log(self, message: str) -> None:
        """Drop the line."""
