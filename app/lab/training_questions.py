"""The questions of policy-gradient training, each with a rule for its answer and before a pool in shuffled order.

From a task set, from journaled runs (`rollouts.py`; the rules then come from a task set with the same questions), or
drawn from the rehearsal world.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

from msgspec import Struct

from app.conductor.protocol import Brief
from app.core.message.chat import Message, Task, Text
from app.core.pool.catalog import Limits, Worker
from app.lab.grading import Grader, grader
from app.lab.lessons import draw_lesson
from app.lab.rollouts import Rollout, Turns, conductor_prompt

SMALLEST = 3
"""Workers of a pool that is drawn at random, if there are as many."""


class Rule(Struct, frozen=True):
    """A conversation and what its answer is held against."""

    conversation: Turns
    grader: Grader
    written: str
    """The rule as data."""


class Question(Struct, frozen=True):
    """A rule before a pool: ordinal n is the worker `workers[n]`."""

    rule: Rule
    workers: tuple[Worker, ...]
    limits: Limits
    message_chars: int = 0
    """Characters of one message that the conductor is shown; 0: all of every message."""

    @property
    def prompt(self) -> Turns:
        """Return the prompt that the `model` conductor is shown in the service."""
        task = Task(tuple(Message(turn["role"], (Text(turn["content"]),)) for turn in self.rule.conversation))  # type: ignore[arg-type]
        brief = Brief(task, self.workers, self.limits, self.limits.usd, message_chars=self.message_chars)
        return conductor_prompt(brief)

    @property
    def names(self) -> list[str]:
        """Return the workers' names, by ordinal."""
        return [worker.name for worker in self.workers]


def of_rollouts(rollouts: Iterable[Rollout], rules: Sequence[Rule]) -> list[Rule]:
    """Return the conversations of journaled runs, each once, that end with a question for which there is a rule; only
    those of the training side."""
    by_question = {_last_question(rule.conversation): rule for rule in rules}
    rules_of_conversations: dict[str, Rule] = {}
    for rollout in rollouts:
        rule = by_question.get(_last_question(rollout.conversation))
        if rule is not None and rollout.split == "train":
            key = json.dumps([dict(turn) for turn in rollout.conversation])
            rules_of_conversations[key] = Rule(rollout.conversation, rule.grader, rule.written)
    return list(rules_of_conversations.values())


def _last_question(conversation: Sequence[Mapping[str, str]]) -> str:
    return (_questions(conversation) or [""])[-1]


def first_question(conversation: Sequence[Mapping[str, str]]) -> str:
    """Return the question with which a conversation begins, whatever the system prompt before it."""
    return (_questions(conversation) or [""])[0]


def _questions(conversation: Sequence[Mapping[str, str]]) -> list[str]:
    return [" ".join(turn["content"].split()) for turn in conversation if turn["role"] == "user"]


def draw_rules(count: int, seed: int) -> list[Rule]:
    """Draw tasks of the rehearsal world's training split."""
    random = Random(seed)
    rules = []
    for _ in range(count):
        problem = draw_lesson(random, "train").problem
        rules.append(_exact_rule(problem.text, problem.answer))
    return rules


def draw_fresh_rules(count: int, drawn: int, seed: int) -> list[Rule]:
    """Return the next `count` tasks after the first `drawn` of `draw_rules`, without those that stand among these."""
    rules = draw_rules(drawn + count, seed)
    known = {first_question(rule.conversation) for rule in rules[:drawn]}
    return [rule for rule in rules[drawn:] if first_question(rule.conversation) not in known]


def _exact_rule(text: str, answer: str) -> Rule:
    spec: dict[str, Any] = {"kind": "exact", "expected": answer}
    return Rule(({"role": "user", "content": text},), grader(spec), json.dumps(spec, sort_keys=True))


def split_held_out(rules: Sequence[Rule], held_out: int, seed: int) -> tuple[list[Rule], list[Rule]]:
    """Return the rules to train with, and those that are held out: at most a tenth. All turns of a conversation, and
    equal questions under several system prompts, are on one side."""
    count = min(held_out, len(rules) // 10)
    sizes = Counter([first_question(rule.conversation) for rule in rules])
    chosen: set[str] = set()
    for name in Random(f"held out|{seed}").sample(list(sizes), len(sizes)):
        if sizes[name] <= count:
            chosen.add(name)
            count -= sizes[name]
    learned, chosen_rules = [], []
    for rule in rules:
        if first_question(rule.conversation) in chosen:
            chosen_rules.append(rule)
        else:
            learned.append(rule)
    return learned, chosen_rules


def draw_questions(
    rules: Sequence[Rule],
    pool: Sequence[Worker],
    limits: Limits,
    count: int,
    seed: int,
    *,
    random_pools: bool,
    message_chars: int = 0,
) -> Iterator[Question]:
    """Yield `count` questions: the rules in turn, in an order and before pools that depend on the seed alone. The
    workers are always shuffled; with `random_pools`, only some of them are there."""
    random = Random(seed)
    order: list[Rule] = []
    for _ in range(count):
        if not order:
            order = random.sample(rules, len(rules))
        size = len(pool)
        if random_pools:
            size = random.randint(min(SMALLEST, len(pool)), len(pool))
        yield Question(order.pop(), tuple(random.sample(pool, size)), limits, message_chars)
