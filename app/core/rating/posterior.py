"""The posterior of a selector: a Bayesian logistic regression whose arms share their parts.

The log-odds that an arm's answer is right are a sum over `base` (how hard the request is) and the arm's parts (who
answers, who helps, the template), each linear in the request's features. Parts are shared by many arms, so a rating of
one arm says something of all that have a part in common. A part of a worker names its model as well, so that another
model under the same worker's name starts from its prior. Every weight is a normal distribution of its own; a rating
moves those that contributed to it by one step of assumed-density filtering, in plain arithmetic and in any order of
ratings nearly to the same place. A weight without ratings is at its prior: zero, relative to the expectation from a
worker's card (`card_log_odds`). What has been learned fades by `decay` a day, back towards the prior.

The ratings of each worker are compared with their predictions (a two-sided cumulative sum of log likelihood ratios),
and with the usual rating of this worker, because predictions learn from the very ratings that differ from them. Where
they differ for too long, the worker has changed: its beliefs are reset to the prior, and those of the others count for
a third, because a worker that was worse may be the better one now.

Costs are measured and not estimated: the cost of an arm is averaged separately, and reduces the worth of a right
answer.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from app.core.plan.templates import ANSWERED, Arm
from app.core.pool.catalog import Price, SelectorSpec, Worker
from app.core.rating.features import COUNTED, WIDTH, Features, words
from app.core.records import record

VERSION = "posterior-3"
BIAS, COUNTS, VECTORS = WIDTH, WIDTH + 1, WIDTH + 1 + COUNTED
"""Places of a part's weights behind those of the words. The part `answered` has the counts of an answer in `COUNTS`."""
FIRST_LOG_ODDS = 1.0
"""The log-odds of a right answer of which nothing is known."""
Variances = tuple[float, float, float]
"""Variances of weights: for words and embeddings, bias and counts; 0 where a part does not use them."""
VARIANCES: Mapping[str, Variances] = {
    "base": (0.2, 1.0, 0.1),
    "main": (0.3, 0.2, 0.05),
    "template": (0.0, 0.3, 0.05),
    "answered": (0.3, 0.3, 0.05),
}
"""The prior variances of a part's weights, before any rating."""
HELPER = (0.0, 0.3, 0.0)
"""The prior variances of the parts `plan:`, `check:` and other helpers."""
DEARER_BY_COUNT = (0.061, -0.154, 0.098, -0.089, 0.152)
"""The log-odds by which a worker is expected to be better for each doubling of its price, for each count of a request,
fitted to the recorded outcomes of GSM8K: they grow with the length of a text and with repeated words."""
DEARER, LEAST_DEARER, MOST_DEARER = -0.1, 0.02, 0.6
"""The constant of that sum, halfway between what fits GSM8K and MMLU, and the limits of the sum."""
FREE_DOUBLINGS = 5.0
"""The doublings by which a worker without a price is taken to be cheaper than the cheapest one that has a price."""
SHIFT = 1.5
"""The change in log-odds, up or down, that the comparison of ratings with predictions looks for."""
CHANGE_EVIDENCE = 6.0
"""The cumulative log likelihood ratio at which a worker has changed."""
NO_EVIDENCE = (0.0, 0.0)
DROP = 1.0
"""The fall in log-odds below a worker's usual rating that is looked for."""
DROP_EVIDENCE = 6.0
"""The cumulative log likelihood ratio at which there is one."""
USUAL_RATINGS, LEAST_USUAL = 200.0, 30.0
"""The ratings over which a worker's usual one is averaged, and the least with which others are compared."""
SUSPICION = 2.0
"""The evidence of a fall from which on the usual rating stays as it is until the evidence is gone."""
KEPT_SHARE = 0.3
"""The share by which beliefs about the other workers count after one of them has changed."""
USUAL_INPUT_TOKENS, USUAL_OUTPUT_TOKENS = 600, 300
"""Tokens of a step for which no bill has been seen."""
SUPPOSED_BILLS = 2.0
"""The number of bills that the cost estimated from prices counts as."""

Weight = tuple[float, float]
"""Mean and variance."""


class UsualRating(NamedTuple):
    """The mean of a worker's ratings, and the evidence that later ones are lower."""

    ratings: float = 0.0
    """The ratings in the mean, at most `USUAL_RATINGS`."""
    mean: float = 0.0
    fall: float = 0.0
    """The cumulative log likelihood ratio for a fall by `DROP`."""


@record(frozen=True, slots=True)
class Posterior:
    """The beliefs that a selector has after `ratings` ratings. A part or place that is missing stands at its prior."""

    weights: Mapping[str, Mapping[int, Weight]] = field(default_factory=dict)
    """By part and place."""
    bills: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By arm: the number of its bills and their mean in micro-dollars."""
    ratio: tuple[float, float] = (0.0, 1.0)
    """The number of bills of all arms, and how many times what prices suggest they are on average."""
    ratings: int = 0
    at: float = 0.0
    """The time up to which it has faded, in seconds since 1970."""
    watches: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By the part of a worker that answers: the cumulative evidence that it has become worse, and better."""
    usual: Mapping[str, UsualRating] = field(default_factory=dict)
    """The usual rating of each worker that answers, by the same part; `DROP` is a fall below it."""
    changes: int = 0
    """The number of changes of workers that were detected."""

    def to_json(self) -> bytes:
        """Canonical: equal posteriors are equal bytes."""
        weights: dict[str, dict[str, list[float]]] = {}
        for part, by_place in self.weights.items():
            weights[part] = {str(place): list(weight) for place, weight in by_place.items()}
        plain = {
            "version": VERSION,
            "weights": weights,
            "bills": {arm: list(bill) for arm, bill in self.bills.items()},
            "ratio": list(self.ratio),
            "ratings": self.ratings,
            "at": self.at,
            "watches": {part: list(evidence) for part, evidence in self.watches.items()},
            "usual": {part: list(usual) for part, usual in self.usual.items()},
            "changes": self.changes,
        }
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def from_json(body: bytes) -> Posterior:
    """Return the inverse of `Posterior.to_json`; an empty posterior for one of another version."""
    value: dict[str, Any] = json.loads(body)
    if value.get("version") != VERSION:
        return Posterior()
    weights: dict[str, dict[int, Weight]] = {}
    for part, by_place in value["weights"].items():
        weights[part] = {int(place): (mean, variance) for place, (mean, variance) in by_place.items()}
    return Posterior(
        weights=weights,
        bills={arm: (count, mean) for arm, (count, mean) in value["bills"].items()},
        ratio=(value["ratio"][0], value["ratio"][1]),
        ratings=value["ratings"],
        at=value["at"],
        watches={part: (worse, better) for part, (worse, better) in value["watches"].items()},
        usual={part: UsualRating(*usual) for part, usual in value.get("usual", {}).items()},
        changes=value["changes"],
    )


def digest(body: bytes) -> str:
    """Return the name of a posterior in the journal, which also has its number: 16 hexadecimal digits."""
    return hashlib.sha256(body).hexdigest()[:16]


def prior_of(part: str) -> Variances:
    """Return the prior variances of a part's weights."""
    return VARIANCES.get(part.partition(":")[0], HELPER)


def spread_of(prior: Variances, place: int) -> float:
    """Return the prior variance of the weight at a place."""
    if place < BIAS or place >= VECTORS:
        return prior[0]
    return prior[1] if place == BIAS else prior[2]


def _inputs(part: str, features: Features) -> Iterator[tuple[int, float, float]]:
    """Yield the place, the value and the prior variance of each input that a part looks at."""
    of_words, of_bias, of_counts = prior_of(part)
    yield BIAS, 1.0, of_bias
    if part == ANSWERED:
        for place, value in features.answer:
            yield (place, value, of_words) if place < WIDTH else (place + COUNTS - WIDTH, value, of_counts)
        return
    if of_words:
        for place, value in features.words:
            yield place, value, of_words
        for place, value in features.vector:
            yield VECTORS + place, value, of_words
    if of_counts:
        for n, value in enumerate(features.counts):
            yield COUNTS + n, value, of_counts


def belief_about(posterior: Posterior, part: str, features: Features) -> Weight:
    """Return the mean and the variance of what a part adds to the log-odds of this request."""
    known = posterior.weights.get(part, {})
    mean = variance = 0.0
    for place, value, prior in _inputs(part, features):
        weight, spread = known.get(place, (0.0, prior))
        mean += value * weight
        variance += value * value * spread
    return mean, variance


def card_log_odds(workers: Sequence[Worker], features: Features) -> Mapping[str, float]:
    """Return the prior log-odds of each worker from its card, before any rating: more for a higher price, and more if
    the request names one of its strengths."""
    cheapest = min((worker.price.output for worker in workers if worker.price.output), default=1)
    free = any(not worker.price.output for worker in workers)
    edge = DEARER + sum([weight * count for weight, count in zip(DEARER_BY_COUNT, features.counts, strict=True)])
    edge = min(max(edge, LEAST_DEARER), MOST_DEARER)
    asked = dict(features.words)
    log_odds = {}
    for worker in workers:
        match = sum([value * asked.get(place, 0.0) for place, value in _strength_inputs(worker.card.strengths)])
        doublings = 0.0
        if worker.price.output:
            doublings = math.log2(worker.price.output / cheapest) + FREE_DOUBLINGS * free
        log_odds[worker.name] = edge * doublings + match
    return log_odds


@lru_cache(512)
def _strength_inputs(strengths: tuple[str, ...]) -> tuple[tuple[int, float], ...]:
    return words(" ".join(strengths))


@record(frozen=True, slots=True)
class Estimate:
    """An arm's log-odds of a right answer (mean and deviation), and what of its worth the costs leave."""

    arm: Arm
    mean: float
    deviation: float
    left: float
    usd: float = 0.0
    """The expected cost in micro-dollars."""

    @property
    def success(self) -> float:
        """Return the expected probability of a right answer, at the mean."""
        return logistic(self.mean)

    @property
    def worth(self) -> float:
        """Return the expected worth at the mean."""
        return self.left * logistic(self.mean)


def estimates(
    posterior: Posterior,
    spec: SelectorSpec,
    arms: Sequence[Arm],
    workers: Sequence[Worker],
    features: Features,
    spent: float = 0.0,
) -> tuple[Estimate, ...]:
    """Return the estimate of every arm. The deviation is without what all arms share. `spent` are the micro-dollars
    that the run has cost before, which are a part of what its answer costs."""
    models = {worker.name: worker.model for worker in workers}
    names = {part for arm in arms for part in arm.parts}
    parts = {part: belief_about(posterior, of_model(part, models), features) for part in names}
    base = FIRST_LOG_ODDS + belief_about(posterior, "base", features)[0]
    cards = card_log_odds(workers, features)
    prices = {worker.name: worker.price for worker in workers}
    estimated = []
    for arm in arms:
        added = [parts[part] for part in arm.parts]
        mean = base + cards.get(arm.main, 0.0) + sum([mean for mean, _ in added])
        deviation = math.sqrt(sum([variance for _, variance in added]))
        usd = bill(posterior, arm, prices, models)
        estimated.append(Estimate(arm, mean, deviation, _left_of_worth(spec, spent + usd), usd))
    return tuple(estimated)


def _left_of_worth(spec: SelectorSpec, usd: float) -> float:
    """Return the part of an answer's worth that is left when these micro-dollars are paid for it."""
    if not spec.full_usd:
        return 1.0
    return 1 - spec.cost * min(1.0, usd / spec.full_usd)


def of_model(part: str, models: Mapping[str, str]) -> str:
    """Return the name under which a part is learned: a worker's with its model, so that a worker whose model is
    exchanged is somebody else."""
    role, _, worker = part.partition(":")
    if worker in models:
        return f"{role}:{worker}={models[worker]}"
    return part


def _bill_name(arm: Arm, models: Mapping[str, str]) -> str:
    """Return the name under which the bills of an arm are kept, with the models of its workers."""
    workers = [f"{step.worker}={models.get(step.worker, '')}" for step in arm.steps]
    return " ".join([arm.template, *workers])


def bill(posterior: Posterior, arm: Arm, prices: Mapping[str, Price], models: Mapping[str, str]) -> float:
    """Return the estimated cost of an arm in micro-dollars: the mean of its bills, shrunk towards the cost that its
    workers' prices suggest."""
    count, mean = posterior.bills.get(_bill_name(arm, models), (0.0, 0.0))
    guess = estimate_bill(arm, prices) * posterior.ratio[1]
    return (count * mean + SUPPOSED_BILLS * guess) / (count + SUPPOSED_BILLS)


def estimate_bill(arm: Arm, prices: Mapping[str, Price]) -> float:
    """Return the cost of an arm in micro-dollars if every step had the usual number of tokens."""
    known = [prices[step.worker] for step in arm.steps if step.worker in prices]
    return sum([price.input * USUAL_INPUT_TOKENS + price.output * USUAL_OUTPUT_TOKENS for price in known]) / 1e6


@record(frozen=True, slots=True)
class Rating:
    """One run as it is learned: the arm that was played on a request, its cost, and its score.

    `before` is the score of the run until now, None if it had none; a changed score moves the means by the difference
    and leaves the variances.
    """

    arm: Arm
    seen: Features
    score: float
    usd: int | None
    """Micro-dollars; None where the cost of the arm alone is not known."""
    at: float
    before: float | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    """The models of the workers that answered, where they are known; else they are those of the catalog."""
    weight: float = 1.0
    """The part of a whole rating that it counts for, above 0 and up to 1."""


class _Term(NamedTuple):
    """One weight that takes part in a prediction, with the input by which it is multiplied."""

    part: str
    place: int
    value: float
    """The input."""
    mean: float
    variance: float


def learned(posterior: Posterior, spec: SelectorSpec, workers: Sequence[Worker], rating: Rating) -> Posterior:
    """Return the posterior after one more rating: one step of assumed-density filtering."""
    posterior = faded(posterior, spec.decay, rating.at)
    models = {**{worker.name: worker.model for worker in workers}, **rating.models}
    parts = ["base", *[of_model(part, models) for part in rating.arm.parts]]
    terms = _terms(posterior, parts, rating.seen)
    log_odds = FIRST_LOG_ODDS + card_log_odds(workers, rating.seen).get(rating.arm.main, 0.0)
    log_odds += sum([term.value * term.mean for term in terms])
    spread = sum([term.value * term.value * term.variance for term in terms])
    chance = logistic(log_odds / math.sqrt(1 + math.pi * spread / 8))
    weights = _update_weights(posterior, terms, rating, chance, spread)
    if rating.before is not None:
        return replace(posterior, weights=weights)
    bills, ratio = _add_bill(posterior, workers, rating, models)
    after = replace(posterior, weights=weights, bills=bills, ratio=ratio, ratings=posterior.ratings + 1)
    return _look_for_change(after, parts[1], chance, rating)


def _terms(posterior: Posterior, parts: Sequence[str], features: Features) -> list[_Term]:
    """Return the weights of these parts that a request has an input for."""
    terms = []
    for part in parts:
        known = posterior.weights.get(part, {})
        for place, value, prior in _inputs(part, features):
            mean, variance = known.get(place, (0.0, prior))
            terms.append(_Term(part, place, value, mean, variance))
    return terms


def _update_weights(
    posterior: Posterior, terms: Sequence[_Term], rating: Rating, chance: float, spread: float
) -> dict[str, Mapping[int, Weight]]:
    """Return all weights. Those of the terms move by the difference between a rating and its prediction, each as far
    as its own variance goes. A first rating reduces the variances as well."""
    certainty = chance * (1 - chance) * rating.weight
    compared = chance if rating.before is None else rating.before
    surprise = (rating.score - compared) * rating.weight
    moved = {term.part: dict(posterior.weights.get(term.part, {})) for term in terms}
    for term in terms:
        gain = term.value * term.variance / (1 + spread * certainty)
        variance = term.variance
        if rating.before is None:
            variance *= 1 - term.value * gain * certainty
        moved[term.part][term.place] = (term.mean + gain * surprise, variance)
    return {**posterior.weights, **moved}


def _look_for_change(posterior: Posterior, part: str, chance: float, rating: Rating) -> Posterior:
    """Add the evidence of one rating for a change of the worker `part`. Returns the posterior, with the beliefs reset
    if the evidence is enough."""
    worse, better = posterior.watches.get(part, NO_EVIDENCE)
    worse = max(0.0, worse + rating.weight * _evidence(chance, rating.score, -SHIFT))
    better = max(0.0, better + rating.weight * _evidence(chance, rating.score, SHIFT))
    watches = {**posterior.watches, part: (worse, better)}
    usual = {**posterior.usual, part: _update_usual(posterior.usual.get(part, UsualRating()), rating)}
    if max(worse, better) < CHANGE_EVIDENCE and usual[part].fall < DROP_EVIDENCE:
        return replace(posterior, watches=watches, usual=usual)
    worker = part.partition(":")[2]
    weights = {name: _reset_part(name, by_place, worker) for name, by_place in posterior.weights.items()}
    watches = dict.fromkeys(watches, NO_EVIDENCE)
    usual = dict.fromkeys(usual, UsualRating())
    return replace(posterior, weights=weights, watches=watches, usual=usual, changes=posterior.changes + 1)


def _update_usual(known: UsualRating, rating: Rating) -> UsualRating:
    """Return a worker's usual rating and the evidence of a fall after one more rating."""
    count, mean, fall = known
    if count >= LEAST_USUAL:
        fall = max(0.0, fall + rating.weight * _evidence(mean, rating.score, -DROP))
    if fall < SUSPICION:
        count = min(count + rating.weight, USUAL_RATINGS)
        mean += (rating.score - mean) * rating.weight / count
    return UsualRating(count, mean, fall)


def _evidence(chance: float, score: float, shift: float) -> float:
    """Return the log likelihood ratio of a score between log-odds that have shifted and those that were expected."""
    chance = min(max(chance, 0.02), 0.98)
    shifted = logistic(math.log(chance / (1 - chance)) + shift)
    return score * math.log(shifted / chance) + (1 - score) * math.log((1 - shifted) / (1 - chance))


def _reset_part(part: str, weights: Mapping[int, Weight], changed: str) -> Mapping[int, Weight]:
    """Return the weights of a part after the worker `changed` has changed: its own are at their priors again, and
    those of other workers are kept in part."""
    role, _, worker = part.partition(":")
    if role in ("base", "template", ANSWERED):
        return weights
    share = 0.0 if worker == changed else KEPT_SHARE
    prior = prior_of(part)
    return {place: _fade_weight(weight, spread_of(prior, place), share) for place, weight in weights.items()}


def _add_bill(
    posterior: Posterior, workers: Sequence[Worker], rating: Rating, models: Mapping[str, str]
) -> tuple[Mapping[str, tuple[float, float]], tuple[float, float]]:
    """Return the bills and their ratio to what prices suggested, with one more bill if the cost of the arm is known."""
    if rating.usd is None:
        return posterior.bills, posterior.ratio
    name = _bill_name(rating.arm, models)
    bills = {**posterior.bills, name: _add_to_mean(posterior.bills.get(name, (0.0, 0.0)), rating.usd)}
    guess = estimate_bill(rating.arm, {worker.name: worker.price for worker in workers})
    if not guess:
        return bills, posterior.ratio
    return bills, _add_to_mean(posterior.ratio, rating.usd / guess)


def _add_to_mean(known: tuple[float, float], value: float) -> tuple[float, float]:
    """Return a count and a mean after one more value."""
    count, mean = known
    return count + 1, mean + (value - mean) / (count + 1)


FADE_SECONDS = 3_600.0
"""Seconds after which a posterior is made to fade; less is not worth the work."""


def faded(posterior: Posterior, decay: float, now: float) -> Posterior:
    """Return the posterior in which what it knows counts less, by the days since it last faded."""
    if not posterior.at:
        return replace(posterior, at=now)
    if now - posterior.at < FADE_SECONDS:
        return posterior
    share = decay ** ((now - posterior.at) / 86_400)
    weights: dict[str, dict[int, Weight]] = {}
    for part, by_place in posterior.weights.items():
        prior = prior_of(part)
        weights[part] = {
            place: _fade_weight(weight, spread_of(prior, place), share) for place, weight in by_place.items()
        }
    bills = {arm: (count * share, mean) for arm, (count, mean) in posterior.bills.items()}
    ratio = (posterior.ratio[0] * share, posterior.ratio[1])
    watches, usual = faded_watches(posterior, share), faded_usual(posterior, share)
    return replace(posterior, weights=weights, bills=bills, ratio=ratio, at=now, watches=watches, usual=usual)


def faded_watches(posterior: Posterior, share: float) -> Mapping[str, tuple[float, float]]:
    """Return the evidence for changes of workers, of which a share is kept."""
    return {part: (worse * share, better * share) for part, (worse, better) in posterior.watches.items()}


def faded_usual(posterior: Posterior, share: float) -> Mapping[str, UsualRating]:
    """Return the usual ratings of workers, of which a share is kept."""
    kept = {}
    for part, usual in posterior.usual.items():
        kept[part] = UsualRating(usual.ratings * share, usual.mean, usual.fall * share)
    return kept


def _fade_weight(weight: Weight, prior: float, share: float) -> Weight:
    """Return a weight in which what the ratings have added counts by `share`. Precisions add up, and so do the means in
    their measure."""
    mean, variance = weight
    precision = 1 / prior + share * (1 / variance - 1 / prior)
    return share * mean / variance / precision, 1 / precision


def logistic(value: float) -> float:
    """Return the probability that log-odds stand for."""
    if value > -500:
        return 1 / (1 + math.exp(-value))
    return 0.0
