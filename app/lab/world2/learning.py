"""A policy over workers and shapes that learns in world 2 from one verdict an execution, of a judge who errs.

What it is given: cards, the texts of tasks with their token counts, which of its training texts have which families and
are confidential (`reading.py`), prices, and the judge's rates of error, which an operator calibrates on a few checked
answers. What it learns from verdicts alone: how good each worker is in each domain (shrunken towards its card), how
hard each family is, and what every role, document, digest and handover does.

It has a model of workflows: parts are solved apart, answers are copied, checked and voted on, and a task is harder or
easier for all. That is the form of this world, and of its rules for plans, but none of its figures, which begin at
ignorance. So it says what verdicts can teach to a policy that knows how workflows work; it is no evidence that real
workers follow this form. The figures are the most probable ones under weak priors (maximum a posteriori), found by
stochastic gradients. From them it computes the reward that it expects of every plan, and chooses the best.

Executions: a first part at random over all shapes and workers; then a quarter at random, the rest among plans that
were best for tasks over the pool by what was believed so far. Each plan is carried out once, by the executor, through
messages.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from app.lab.world2.baselines import Chosen, Setting
from app.lab.world2.constants import DOCUMENT_TOKENS, DOMAINS, TRAITS, Constants, constants
from app.lab.world2.execution import play, verdict
from app.lab.world2.gradients import Value
from app.lab.world2.outcome import Rewards, everything, plans
from app.lab.world2.reading import Read, Reader
from app.lab.world2.rules import ANSWERING, LANGUAGE, PARTIAL, hands, taken_over
from app.lab.world2.shapes import Plan, Shape, catalogue
from app.lab.world2.tasks import Family, Part, Task, task
from app.lab.world2.workers import SAMPLES, Card, Pool, Worker, pool, workers

Figures: TypeAlias = dict[str, NDArray[np.float64]]
BUDGETS = (1_000, 4_000, 16_000, 64_000)
POOLS, READ_TASKS, POSED, CONSIDERED = 20, 1_500, 6_000, 15
"""Pools of training beside the seen ones, labelled texts, different tasks that are executed, and the tasks of each pool
whose best plans are tried."""
PRIORS: Mapping[str, tuple[float, float]] = {
    "shift": (0.0, 0.5), "price": (0.0, 0.2), "plan": (0.0, 0.3), "load": (0.1, 0.2), "short": (-0.7, 0.7),
    "long": (-1.0, 0.7), "truncated": (-1.5, 1.0), "kept": (2.0, 1.0), "lost": (-1.5, 1.0), "keeps": (2.0, 1.0),
    "finds_own": (-0.5, 1.0), "finds_other": (0.0, 1.0), "skill": (0.3, 0.3), "pair": (0.3, 0.7),
    "majority": (1.5, 1.0), "handover": (3.0, 1.0), "trait": (1.0, 0.5),
}  # fmt: skip
"""Mean and deviation of what is believed of each figure before any verdict, as one would guess without sources."""
CARDS: Mapping[str, tuple[float, float]] = {"overall": (1.0, 0.3), "deviation": (1.0, 0.3)}
"""The same of what a card's rate over all domains, and its deviation from it in one, are worth; by sample size."""
SPREADS = {"reason": 0.4, "families": 0.7, "abilities": 0.4, "edges": 0.3}
"""Deviations, about 0, of the effects of thinking by domain, of families, and of workers from their cards."""
RATE, BATCH = 0.03, 512
TRIED = 0.75
"""The share of executions, after the first part, that try plans which are believed to be best."""
CARD = 6.0
"""Questions of average result that a card counts in addition."""


@dataclass(frozen=True, slots=True)
class Row:
    """One execution as it is learned from."""

    shape: str
    read: Read
    members: tuple[int, ...]
    """The places of the workers of its steps among all workers of training."""
    passed: bool


class Learner:
    """Beliefs, and the executions that they rest on."""

    def __init__(self, seed: int, seen: Sequence[Pool], texts: int = READ_TASKS) -> None:
        self._random = Random(f"world-2|learner|{seed}")
        labelled = [task(self._random, "train") for _ in range(texts)]
        self.reader = Reader(labelled)
        self._places = {worker.name: place for place, worker in enumerate(workers(unseen=False))}
        self._pools = [*seen, *[pool(self._random) for _ in range(POOLS)]]
        self._labelled = labelled
        self._rows: list[Row] = []
        self._tasks: list[tuple[Task, Read]] = []
        self._steps = 0
        self.figures = _ignorance(len(self.reader.families), len(self._places))
        self._cards = CardRows.of([worker.card for worker in workers(unseen=False)])
        self._context = np.array([worker.card.context for worker in workers(unseen=False)])

    def grow(self, executions: int) -> None:
        """Execute plans until there are so many, and learn from all of them."""
        tried = self._believed_best() if self._rows else {}
        while len(self._rows) < executions:
            self._execute(tried)
        self._learn()

    def _execute(self, tried: Mapping[int, Sequence[Plan]]) -> None:
        """Execute a plan once and keep the verdict."""
        random = self._random
        place = random.randrange(len(self._pools))
        chosen, posed, read = self._pools[place], *self._posed()
        if tried and random.random() < TRIED:
            plan = random.choice(tried[place])
        else:
            name = random.choice(sorted(catalogue()))
            plan = Plan(name, tuple(random.randrange(len(chosen)) for _ in catalogue()[name]))
        passed = verdict(play(plan, posed, chosen, random).right, random)
        members = tuple(self._places[chosen[worker].name] for worker in plan.workers)
        self._rows.append(Row(plan.shape, read, members, passed))

    def _posed(self) -> tuple[Task, Read]:
        """A task of training, and how it is read."""
        if len(self._tasks) < POSED:
            posed = task(self._random, "train")
            self._tasks.append((posed, self.reader.read(posed)))
            return self._tasks[-1]
        return self._random.choice(self._tasks)

    def _believed_best(self) -> dict[int, list[Plan]]:
        """For each pool the plans that are believed to be best for some tasks."""
        found: dict[int, list[Plan]] = {}
        for place, chosen in enumerate(self._pools):
            rewards, every = self.believed(chosen), plans(len(chosen))
            posed = self._random.sample(self._labelled, CONSIDERED)
            found[place] = [every[self.best(rewards, one)] for one in posed]
        return found

    # What is believed.

    def believed(self, chosen: Pool) -> Rewards:
        """Return the rewards that would be true if what is believed were."""
        return Rewards(tuple(self._worker(worker) for worker in chosen), self._constants())

    def understood(self, posed: Task, read: Read) -> Task:
        """Return a task as this reading has it, with families as hard as is believed."""
        parts = []
        for place in read.families:
            family = self.reader.families[place]
            hard = float(self.figures["families"][place])
            parts.append(Part(Family(family.name, family.domain, hard, (), held_out=False), "", " "))
        return replace(posed, parts=tuple(parts), confidential=read.confidential)

    def best(self, rewards: Rewards, posed: Task) -> int:
        """Return the place of the plan that is believed to be best, over all readings of a task."""
        total = np.zeros(1)
        for read in self.reader.readings(posed):
            total = total + read.weight * everything(rewards, self.understood(posed, read))
        return int(total.argmax())

    def _worker(self, worker: Worker) -> Worker:
        values = self.figures
        place = self._places.get(worker.name)
        card = worker.card if place is None else workers(unseen=False)[place].card
        skills = CardRows.of([card]).skills(values)[0]
        if place is not None:
            skills = skills + values["abilities"][place]
            skills = skills + values["edges"][len(DOMAINS) * place : len(DOMAINS) * (place + 1)]
        ability = float(skills.mean())
        return replace(worker, ability=ability, edges=tuple(float(skill) - ability for skill in skills))

    def _constants(self) -> Constants:
        """The world's constants, with what is learned in the place of what is true; prices and tokens are known."""
        value = {name: float(self.figures[name][0]) for name in PRIORS}
        mean = float(self._cards.skills(self.figures).mean())
        return replace(
            constants(), ability_mean=mean, trait_sd=value["trait"], reason=tuple(self.figures["reason"].tolist()),
            plan_good=value["plan"], plan_bad=value["plan"], load=value["load"],
            length=(0.0, -value["short"], -value["long"]), digest_keeps=value["kept"], digest_lost=value["lost"],
            truncated=value["truncated"], keeps=value["keeps"], finds_own=value["finds_own"],
            finds_other=value["finds_other"], check_skill=value["skill"], pair=value["pair"],
            majority=value["majority"], unanimous=value["pair"] + 2 * value["majority"] + 1.0,
            handover=1 / (1 + math.exp(-value["handover"])),
        )  # fmt: skip

    # Learning.

    def _learn(self) -> None:
        """Stochastic gradients over all rows, from what was believed before."""
        groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
        for row in self._rows:
            groups[row.shape, len(row.read.families)].append(row)
        arrays = {key: self._arrays(rows) for key, rows in groups.items()}
        first = {name: np.zeros_like(array) for name, array in self.figures.items()}
        second = {name: np.zeros_like(array) for name, array in self.figures.items()}
        epochs = max(8, min(40, 160_000 // len(self._rows)))
        batches = [batch for _ in range(epochs) for batch in self._batches(arrays)]
        for step, ((name, parts), batch) in enumerate(batches):
            rate = RATE * (1 - step / len(batches))
            slopes = self._slopes(catalogue()[name], parts, batch)
            for figure, slope in slopes.items():
                first[figure] = 0.9 * first[figure] + 0.1 * slope
                second[figure] = 0.99 * second[figure] + 0.01 * slope**2
                mean, square = first[figure] / (1 - 0.9 ** (step + 1)), second[figure] / (1 - 0.99 ** (step + 1))
                self.figures[figure] = self.figures[figure] - rate * mean / (np.sqrt(square) + 1e-8)

    def _arrays(self, rows: Sequence[Row]) -> dict[str, NDArray[np.int64]]:
        families = np.array([row.read.families for row in rows])
        domains = np.array([family.domain for family in self.reader.families])
        members = np.array([row.members for row in rows])
        document = np.array([row.read.document for row in rows])
        short = self._context[members] < np.array(DOCUMENT_TOKENS)[document][:, None]
        return {
            "families": families, "domains": domains[families], "members": members, "document": document,
            "short": short.astype(np.int64), "passed": np.array([row.passed for row in rows]).astype(np.int64),
        }  # fmt: skip

    def _batches(
        self, arrays: Mapping[tuple[str, int], dict[str, NDArray[np.int64]]]
    ) -> Iterator[tuple[tuple[str, int], dict[str, NDArray[np.int64]]]]:
        keys = sorted(arrays)
        self._random.shuffle(keys)
        for key in keys:
            count = len(arrays[key]["passed"])
            order = np.array(self._random.sample(range(count), count))
            for begin in range(0, count, BATCH):
                yield key, {name: array[order[begin : begin + BATCH]] for name, array in arrays[key].items()}

    def _slopes(self, steps: Shape, parts: int, batch: Mapping[str, NDArray[np.int64]]) -> Figures:
        """The derivatives of the loss: minus the log of the verdicts' chances, and of the priors' in proportion."""
        known = constants()
        figures = {name: Value(array) for name, array in self.figures.items()}
        right = _Chances(figures, steps, parts, batch, self._cards).right()
        slack = 1 - known.judge_false_pass - known.judge_false_fail
        chance = np.clip(known.judge_false_pass + slack * right.array, 1e-6, 1 - 1e-6)
        passed = batch["passed"]
        right.backward(slack * ((1 - passed) / (1 - chance) - passed / chance))
        share = len(passed) / len(self._rows)
        slopes = {}
        for name, value in figures.items():
            mean, deviation = PRIORS.get(name) or CARDS.get(name) or (0.0, SPREADS[name])
            pull = share * (self.figures[name] - mean) / deviation**2
            slopes[name] = pull + (value.gradient if value.gradient is not None else 0.0)
        return slopes


class LearnedPolicy:
    """A learner with the beliefs that it had at one time."""

    def __init__(self, learner: Learner, executions: int) -> None:
        self.name = f"learned from {executions:,} verdicts"
        self._learner = learner
        self._figures = dict(learner.figures)

    def choose(self, setting: Setting, tasks: Sequence[Task]) -> Chosen:
        """Return the plan that is believed to be best for each task."""
        self._learner.figures = self._figures
        rewards = self._learner.believed(setting.pool)
        return np.array([self._learner.best(rewards, posed) for posed in tasks])


@dataclass(frozen=True, slots=True)
class CardRows:
    """Cards as a learner uses them: the shrunken logit of all domains, each domain's deviation from it, the price, and
    the place of the sample's size in `SAMPLES`. One row for each worker."""

    overall: NDArray[np.float64]
    deviations: NDArray[np.float64]
    price: NDArray[np.float64]
    sample: NDArray[np.int64]

    @classmethod
    def of(cls, cards: Sequence[Card]) -> "CardRows":
        """Return the rows of these cards."""
        logits = np.array([card_logits(card) for card in cards])
        overall = logits.mean(axis=1)
        price = np.log2(np.array([card.price for card in cards]))
        sample = np.array([SAMPLES.index(card.asked) for card in cards])
        return cls(overall, logits - overall[:, None], price, sample)

    def skills(self, figures: Figures) -> NDArray[np.float64]:
        """Return what the cards alone lead one to expect, by worker and domain."""
        overall = figures["overall"][self.sample] * self.overall + figures["price"] * self.price + figures["shift"]
        skills: NDArray[np.float64] = overall[:, None] + figures["deviation"][self.sample][:, None] * self.deviations
        return skills


def card_logits(card: Card) -> NDArray[np.float64]:
    """Return a card's pass rates by domain as logits, each shrunken by its sample towards that of all domains."""
    overall = (sum(card.right) + 0.6 * CARD) / (len(card.right) * card.asked + CARD)
    rates = (np.array(card.right) + 2 * CARD * overall) / (card.asked + 2 * CARD)
    logits: NDArray[np.float64] = np.log(rates / (1 - rates))
    return logits


def _ignorance(families: int, members: int) -> Figures:
    figures = {name: np.array([mean]) for name, (mean, _) in PRIORS.items()}
    figures |= {name: np.full(len(SAMPLES), mean) for name, (mean, _) in CARDS.items()}
    sizes = {"reason": len(DOMAINS), "families": families, "abilities": members, "edges": members * len(DOMAINS)}
    return figures | {name: np.zeros(size) for name, size in sizes.items()}


class _Chances:
    """The chance that a batch of executions of one shape is right, as a function of the figures."""

    def __init__(
        self,
        figures: Mapping[str, Value],
        steps: Shape,
        parts: int,
        batch: Mapping[str, NDArray[np.int64]],
        cards: CardRows,
    ) -> None:
        self._figures, self._steps, self._parts, self._batch, self._cards = figures, steps, parts, batch, cards
        self._mean = float(cards.skills({name: value.array for name, value in figures.items()}).mean())
        self._traits = np.array(TRAITS)[None, :]

    def right(self) -> Value:
        """Return the chance by execution."""
        places = [place for place, step in enumerate(self._steps) if step.role == "digest"]
        if not places:
            return self._whole(complete=True)
        at = places[0]
        language = np.full(len(self._batch["passed"]), LANGUAGE)
        logits = self._figures["kept"] + self._figures["truncated"] * self._batch["short"][:, at]
        logits = logits + self._figures["skill"] * (self._skill(at, language) - self._ability(at))
        kept = logits.logistic()
        return kept * self._whole(complete=True) + (1 - kept) * self._whole(complete=False)

    def _whole(self, *, complete: bool) -> Value:
        total: Value = Value(np.ones((1, 1)))
        for part in range(self._parts):
            total = total * self._right_at(len(self._steps) - 1, part, complete=complete)
        return total.mean_of_rows()

    def _right_at(self, at: int, part: int, *, complete: bool) -> Value:
        step = self._steps[at]
        if step.role == "check":
            return self._checked(at, part, complete=complete)
        if step.role == "combine":
            return self._combined(at, part, complete=complete)
        handed = taken_over(self._steps, step, self._parts)
        if part in handed:
            fidelity = self._figures["handover"].logistic()
            return fidelity * self._right_at(handed[part], part, complete=complete)
        return self._solved(at, part, step.role, len(handed), complete=complete)

    def _solved(self, at: int, part: int, role: str, handed: int, *, complete: bool) -> Value:
        figures, batch, step = self._figures, self._batch, self._steps[at]
        domains = batch["domains"][:, part]
        logits = self._skill(at, domains) - figures["families"].at(batch["families"][:, part])
        if role != "solve":
            logits = logits + figures["reason"].at(domains)
        if any(self._steps[seen].role == "plan" for seen in step.sees):
            logits = logits + figures["plan"]
        at_once = 1 if role in PARTIAL else self._parts - handed
        logits = logits - figures["load"] * float(at_once - 1)
        if step.user:
            logits = logits + figures["short"] * (batch["document"] == 1) + figures["long"] * (batch["document"] == 2)
            logits = logits + figures["truncated"] * batch["short"][:, at]
        elif not complete:
            logits = logits + figures["lost"]
        return (logits.column() - figures["trait"] * self._traits).logistic()

    def _skill(self, at: int, domains: NDArray[np.int64]) -> Value:
        members = self._batch["members"][:, at]
        deviation = self._figures["deviation"].at(self._cards.sample[members])
        known = self._by_card(members) + deviation * self._cards.deviations[members, domains]
        edges = self._figures["edges"].at(len(DOMAINS) * members + domains)
        return known + self._figures["abilities"].at(members) + edges

    def _by_card(self, members: NDArray[np.int64]) -> Value:
        """The rate over all domains that the cards alone lead one to expect."""
        overall = self._figures["overall"].at(self._cards.sample[members]) * self._cards.overall[members]
        expected: Value = overall + self._figures["price"] * self._cards.price[members] + self._figures["shift"]
        return expected

    def _ability(self, at: int) -> Value:
        """The mean of a worker's skills over all domains."""
        members = self._batch["members"][:, at]
        ability: Value = self._by_card(members) + self._figures["abilities"].at(members)
        for domain in range(len(DOMAINS)):
            ability = ability + self._figures["edges"].at(len(DOMAINS) * members + domain) * (1 / len(DOMAINS))
        return ability

    def _helper(self, at: int) -> Value:
        """The effect of the ability of who checks or combines."""
        effect: Value = self._figures["skill"] * (self._ability(at) - self._mean)
        return effect

    def _checked(self, at: int, part: int, *, complete: bool) -> Value:
        (seen,) = [place for place in self._steps[at].sees if self._steps[place].role in ANSWERING]
        before = self._right_at(seen, part, complete=complete)
        members = self._batch["members"]
        others = hands(self._steps, seen, self._parts)
        own = (members[:, others] == members[:, [at]]).any(axis=1).astype(float)
        skill = self._helper(at)
        keeps = (self._figures["keeps"] + skill).logistic().column()
        finds = self._figures["finds_own"] * own + self._figures["finds_other"] * (1 - own)
        found = (finds + skill).logistic().column()
        anew = self._solved(at, part, "reason", 0, complete=complete)
        after: Value = before * keeps + (1 - before) * found * anew
        return after

    def _combined(self, at: int, part: int, *, complete: bool) -> Value:
        seen = [place for place in self._steps[at].sees if self._steps[place].role in ANSWERING]
        branches = [self._right_at(place, part, complete=complete) for place in seen]
        counts = [Value(np.ones((1, 1)))]
        for branch in branches:
            nought = Value(np.zeros((1, 1)))
            fewer, more = [*counts, nought], [nought, *counts]
            counts = [stays * (1 - branch) + gains * branch for stays, gains in zip(fewer, more, strict=True)]
        chosen: Value = Value(np.zeros((1, 1)))
        for right in range(1, len(counts)):
            chosen = chosen + counts[right] * self._picks(at, right, len(branches))
        return chosen

    def _picks(self, at: int, right: int, count: int) -> Value:
        """The chance of choosing a right answer where `right` of `count` are."""
        majority = self._figures["majority"] * float(2 * right - count if right < count else 2)
        logits = self._figures["pair"] + majority + (1.0 if right == count else self._helper(at))
        return (logits + np.zeros(len(self._batch["passed"]))).logistic().column()


def learned(seen: Sequence[Setting], seed: int, most: int) -> list[LearnedPolicy]:
    """Return what one learner chooses after each of `BUDGETS` up to `most` executions."""
    learner = Learner(seed, [setting.pool for setting in seen])
    policies = []
    for budget in BUDGETS:
        if budget <= most:
            learner.grow(budget)
            policies.append(LearnedPolicy(learner, budget))
    return policies
