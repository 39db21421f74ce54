"""The policy of the rehearsal conductor: learned over the rehearsal pool from verdicts, and written down as numbers.

`python -m app.lab.world2 --conductor FILE` makes it. A `Learner` executes plans over the rehearsal pool (half of its
executions) and over other pools of training, each once, and is told the verdict of a judge who errs. The rewards that
it believes in are then written down as sums, which the conductor computes without numpy
(`app/providers/rehearsal/policy.py`): words tell how many parts of each domain a task has and how likely it is
confidential, and from these and the length of its document follows what each of a few plans is worth. Those plans are
the ones that add most to what is believed possible on training texts, with any money and under caps.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from app.lab.world2 import constants as figures
from app.lab.world2 import tasks as composed
from app.lab.world2.constants import DOCUMENT_TOKENS, DOMAINS
from app.lab.world2.learning import Learner
from app.lab.world2.outcome import Rewards, all_plans, rewards_of_all_plans
from app.lab.world2.provider import CHARS_PER_TOKEN, REHEARSAL_NAMES, rehearsal_workers
from app.lab.world2.reading import Reading
from app.lab.world2.rules import output_tokens
from app.lab.world2.sentences import presence_of_words, text_counts
from app.lab.world2.shapes import Plan, catalogue, workflow
from app.lab.world2.tasks import MOST_PARTS, Task
from app.lab.world2.workers import Pool
from app.providers.rehearsal.policy import Card, PlanStep, least_price, terms

Matrix: TypeAlias = NDArray[np.float64]
SEED, VERDICTS, TEXTS = 0, 64_000, 2_500
LEAST_TEXTS, RIDGE = 8, 5.0
"""Texts that a word must be in, and the penalty of its weights."""
PLANS, PLANS_WITHIN_CAP = 10, 4
"""Plans that are kept for any money, and for each cap."""
CAPS = (0.0006, 0.0012, 0.0025, 0.005, 0.01)
"""Caps in dollars, of what budgets hold for a plan before it begins, for which plans are kept."""
STRENGTHS: Mapping[str, str] = {
    "sage": "general, planning",
    "scribe": "text, words and letters, extraction, roman numerals",
    "abacus": "arithmetic, equations, number theory",
    "almanac": "dates, unit conversion",
    "lawyer": "logic, checking, judging",
}
"""The strengths on the cards of the rehearsal pool, by which the conductor knows its workers again."""


def write(path: Path) -> None:
    """Learn the policy, and write it to a file."""
    learner = Learner(SEED, [profiles()])
    learner.train_until(VERDICTS)
    texts = composed.draw_tasks("train", "conductor", TEXTS)
    believed = learner.estimate_rewards(profiles())
    rewards = _predict_rewards(learner, believed, texts)
    chosen = _choose_plans(rewards, _compute_reserved_usd(texts))
    reader, vocabulary = _fit_reader(texts)
    latent = _presence(texts, vocabulary) @ reader[1:] + reader[0]
    rows = np.array([terms(list(row), text.document) for row, text in zip(latent, texts, strict=True)])
    scores = np.linalg.solve(rows.T @ rows + 1e-3 * np.eye(rows.shape[1]), rows.T @ rewards[:, chosen])
    plans = all_plans(len(REHEARSAL_NAMES))
    policy = {
        "made_by": "python -m app.lab.world2 --conductor FILE",
        "learned_from": {"verdicts": VERDICTS, "seed": SEED, "texts": TEXTS},
        "constants": figures.FROZEN,
        "families": composed.FROZEN_FAMILIES,
        "workers": [STRENGTHS[name] for name in REHEARSAL_NAMES],
        "start": _round_all(reader[0]),
        "words": {word: _round_all(weights) for word, weights in zip(vocabulary, reader[1:], strict=True)},
        "plans": [_plan_entry(plans[place], scores[:, n]) for n, place in enumerate(chosen)],
    }
    path.write_text(_to_json(policy), encoding="utf-8")


def profiles() -> Pool:
    """Return the workers of the rehearsal pool under the names that training knows them by."""
    return tuple([worker for worker, _ in rehearsal_workers()])


def _predict_rewards(learner: Learner, believed: Rewards, texts: Sequence[Task]) -> Matrix:
    """Return the believed rewards of all plans, by training text; the families of these are labels."""
    places = {family.name: place for place, family in enumerate(learner.reader.families)}
    rewards: dict[object, NDArray[np.float32]] = {}
    for text in texts:
        if text.kind not in rewards:
            families = [places[part.family.name] for part in text.parts]
            reading = Reading(tuple(families), text.document, text.confidential)
            rewards[text.kind] = rewards_of_all_plans(believed, learner.task_as_read(text, reading))
    return np.stack([rewards[text.kind] for text in texts]).astype(float)


def _compute_reserved_usd(texts: Sequence[Task]) -> Matrix:
    """Return the dollars that budgets hold for all plans, by training text, as the conductor reckons them."""
    share = figures.constants().input_share
    cards = [Card(0, "", share * worker.price / 1e6, worker.price / 1e6) for worker in profiles()]
    alone, with_text = [], []
    for plan in all_plans(len(REHEARSAL_NAMES)):
        steps = [PlanStep(*step) for step in _steps(plan)]
        manned = [(cards[step.worker], step) for step in steps]
        alone.append(least_price(manned, 0))
        with_text.append(least_price(manned, 1) - alone[-1])
    sizes = np.array([len(text.text) + DOCUMENT_TOKENS[text.document] * CHARS_PER_TOKEN for text in texts])
    prices: Matrix = np.array(alone) + np.array(with_text) * sizes[:, None]
    return prices


def _choose_plans(rewards: Matrix, prices: Matrix) -> list[int]:
    """Return the plans that add most to the best of those before them: for any money, then within each cap."""
    chosen: list[int] = []
    for cap in (np.inf, *CAPS):
        count = PLANS
        if cap in CAPS:
            count = PLANS_WITHIN_CAP
        within = np.where(prices <= cap, rewards, 0.0)
        best = np.zeros(len(rewards))
        if chosen:
            best = within[:, chosen].max(axis=1)
        for _ in range(count):
            gains = np.maximum(within, best[:, None]).mean(axis=0)
            place = int(gains.argmax())
            if gains[place] <= best.mean() + 1e-5:
                break
            chosen.append(place)
            best = np.maximum(best, within[:, place])
    return chosen


def _fit_reader(texts: Sequence[Task]) -> tuple[Matrix, list[str]]:
    """Return weights and their words. The weights estimate, from the words of a text, its parts by domain and the
    chance that it is confidential: the first row for a text without known words, then one for each word."""
    counts = text_counts([text.text for text in texts])
    vocabulary = [word for word in sorted(counts) if counts[word] >= LEAST_TEXTS]
    presence = _presence(texts, vocabulary)
    targets = np.zeros((len(texts), len(DOMAINS) + 1))
    for row, text in zip(targets, texts, strict=True):
        for part in text.parts:
            row[part.family.domain] += 1
        row[-1] = text.confidential
    mean, mean_target = presence.mean(axis=0), targets.mean(axis=0)
    centred = presence - mean
    weights = np.linalg.solve(centred.T @ centred + RIDGE * np.eye(len(mean)), centred.T @ (targets - mean_target))
    return np.vstack([mean_target - mean @ weights, weights]), vocabulary


def _presence(texts: Sequence[Task], vocabulary: Sequence[str]) -> Matrix:
    return presence_of_words([text.text for text in texts], vocabulary)


def _plan_entry(plan: Plan, scores: Matrix) -> dict[str, Any]:
    """Return a plan as the conductor's file has it, with the weights of its worth."""
    return {"shape": plan.shape, "steps": _steps(plan), "scores": _round_all(scores)}


def _steps(plan: Plan) -> list[tuple[int, str, tuple[str | int, ...], int]]:
    """Return for each step its worker's place, its subtask, what it sees, and the most tokens that it writes for a task
    of any size."""
    steps = []
    roles = [step.role for step in catalogue()[plan.shape]]
    for place, role, step in zip(plan.workers, roles, workflow(plan, REHEARSAL_NAMES).steps, strict=True):
        steps.append((place, step.subtask, tuple(step.access.as_list()), round(output_tokens(role, MOST_PARTS, 0))))
    return steps


def _round_all(values: Matrix) -> list[float]:
    return [round(float(value), 4) for value in values]


def _to_json(policy: Mapping[str, Any]) -> str:
    """Return JSON with one line for each word and each plan, so that changes can be read."""
    lines = []
    for name, value in policy.items():
        if name == "words":
            inner = ",\n".join([f"  {json.dumps(word)}: {json.dumps(row)}" for word, row in value.items()])
            lines.append(f'"{name}": {{\n{inner}\n}}')
        elif name == "plans":
            inner = ",\n".join([f"  {json.dumps(row)}" for row in value])
            lines.append(f'"{name}": [\n{inner}\n]')
        else:
            lines.append(f'"{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"
