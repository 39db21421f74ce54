"""The posterior of a selector: a Bayesian logistic regression whose arms share their parts.

The log-odds that an arm's answer is right are a sum over `base` (how hard the request is) and the arm's parts (who
answers, who helps, the template), each linear in the request's features. Parts are shared by many arms, so a rating of
one arm says something of all that have a part in common. A part of a worker names its model as well, so that another
model under the same worker's name starts from its prior. Every weight is a normal distribution of its own; a rating
moves those that contributed to it by one step of assumed-density filtering, in plain arithmetic and in any order of
ratings nearly to the same place. Ratings measure only the sum of the words that come together, and there are no
covariances that could say so. So each word counts a rating as if it had been the only word, and the sum becomes as
certain as the ratings make it. A weight without ratings is at its prior: zero, relative to the expectation from a
worker's card (`card_log_odds`). What has been learned fades by `decay` a day, back towards the prior.

Workers can change without a change of their name. So there are always two beliefs about each worker: what all ratings
say of it, and what those since a certain moment say, as if it had changed then and little of what had been known before
still held (`PossibleChange`). The ratings since are evidence for the one or the other, by how well each had predicted
them. Workers are expected to change together, as when a provider updates its models, so that evidence against one makes
a change of the others more probable as well, and they are tried again. Decisions go by both beliefs, weighed by their
probabilities. So a false alarm costs little: the evidence fades, and the first belief, which has learned meanwhile,
counts again. Workers that have exchanged their models without saying so are another case (`rating/exchange.py`).

Costs are measured and not estimated: the cost of an arm is averaged separately, and reduces the worth of a right
answer.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from app.core.plan.templates import ANSWERED, Arm
from app.core.pool.catalog import Price, SelectorSpec, Worker
from app.core.rating.exchange import FIRST_RATINGS, Exchanges
from app.core.rating.features import COUNTED, WIDTH, Features, words

VERSION = "posterior-3"
ANSWERING = "main:"
"""The beginning of the name of a part of a worker that answers."""
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
CHANGE_PROBABILITY = 0.05
"""The probability that workers have changed at the moment from which on a change is looked for, before any evidence."""
CHANGED_SHARE = 1 / 3
"""The probability that such a change affects a worker. It is the same for every worker, whatever affects the others."""
KEPT_SHARE = 0.03
"""The share that the ratings before a change keep in the belief about a worker that has changed: 2,000 of them count as
60. Most changes leave a part of what a worker can do as it was, and that belief need not learn it anew."""
WIDER_IF_CHANGED = 2.0
"""The factor of the prior variances of that belief, so that the first ratings since the change outweigh that share."""
EVIDENCE_FACTOR = 1.5
"""The factor of the evidence for a change and against it. The older belief learns from the same ratings, and so
explains a part of what differs from it: the likelihoods alone show a change too late."""
RATINGS_UNTIL_SETTLED = 500.0
"""The ratings after which the more probable belief about each worker is kept, and the other one is forgotten."""
USUAL_INPUT_TOKENS, USUAL_OUTPUT_TOKENS = 600, 300
"""Tokens of a step for which no bill has been seen."""
SUPPOSED_BILLS = 2.0
"""The number of bills that the cost estimated from prices counts as."""

Weight = tuple[float, float]
"""Mean and variance."""


class PossibleChange(Struct, frozen=True):
    """Beliefs about workers as if some had changed at a certain moment, and the evidence for it since.

    Workers are named by the part of the one that answers. What has had no ratings since the moment is missing: if the
    worker has changed, `KEPT_SHARE` of the usual belief is left.
    """

    weights: Mapping[str, Mapping[int, Weight]] = {}
    """By part and place, as in a posterior: what was left at the moment, with the ratings since."""
    evidence: Mapping[str, float] = {}
    """By part: the log likelihood ratio of the worker's ratings since, for these beliefs and against the usual ones."""
    ratings: float = 0.0
    """The ratings since."""

    @property
    def total_evidence(self) -> float:
        """Return the log likelihood ratio of all ratings since, for the event that some workers have changed."""
        return sum([_log_mixture(evidence) for evidence in self.evidence.values()])

    @property
    def probability(self) -> float:
        """Return the probability that some workers have changed at this moment."""
        return logistic(log_odds(CHANGE_PROBABILITY) + self.total_evidence)

    def share(self, part: str) -> float:
        """Return the probability that a worker is affected if some have changed."""
        return logistic(log_odds(CHANGED_SHARE) + self.evidence.get(part, 0.0))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"weights": _weights_to_json(self.weights), "evidence": dict(self.evidence), "ratings": self.ratings}


def _log_mixture(evidence: float) -> float:
    """Return the log of the likelihood ratio of a worker that is affected by a change with `CHANGED_SHARE`."""
    largest = max(evidence, 0.0)
    changed, unchanged = CHANGED_SHARE * math.exp(evidence - largest), (1 - CHANGED_SHARE) * math.exp(-largest)
    return largest + math.log(changed + unchanged)


class Posterior(Struct, frozen=True):
    """The beliefs that a selector has after `ratings` ratings. A part or place that is missing stands at its prior."""

    weights: Mapping[str, Mapping[int, Weight]] = {}
    """By part and place."""
    bills: Mapping[str, tuple[float, float]] = {}
    """By arm: the number of its bills and their mean in micro-dollars."""
    ratio: tuple[float, float] = (0.0, 1.0)
    """The number of bills of all arms, and how many times what prices suggest they are on average."""
    ratings: int = 0
    at: float = 0.0
    """The time up to which it has faded, in seconds since 1970."""
    possible: PossibleChange | None = None
    """The change that is looked for; None where no rating has been learned since there is one."""
    changes: int = 0
    """The number of changes and exchanges of workers that were found."""
    exchanges: Exchanges = Exchanges()
    """The workers that are known under another one's name."""

    def to_json(self) -> bytes:
        """Return the posterior as canonical JSON: equal posteriors are equal bytes."""
        plain = {
            "version": VERSION,
            "weights": _weights_to_json(self.weights),
            "bills": {arm: list(bill) for arm, bill in self.bills.items()},
            "ratio": list(self.ratio),
            "ratings": self.ratings,
            "at": self.at,
            "changes": self.changes,
            "exchanges": self.exchanges.to_json(),
        }
        if self.possible is not None:
            plain["possible"] = self.possible.to_json()
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def from_json(body: bytes) -> Posterior:
    """Return the inverse of `Posterior.to_json`; an empty posterior for one of another version."""
    value: dict[str, Any] = json.loads(body)
    if value.get("version") != VERSION:
        return Posterior()
    possible = None
    if "possible" in value:  # earlier releases have not written it
        change = value["possible"]
        possible = PossibleChange(_weights_from_json(change["weights"]), change["evidence"], change["ratings"])
    return Posterior(
        weights=_weights_from_json(value["weights"]),
        bills={arm: (count, mean) for arm, (count, mean) in value["bills"].items()},
        ratio=(value["ratio"][0], value["ratio"][1]),
        ratings=value["ratings"],
        at=value["at"],
        possible=possible,
        changes=value["changes"],
        exchanges=Exchanges(**value.get("exchanges", {})),  # earlier releases have not written them
    )


def _weights_to_json(weights: Mapping[str, Mapping[int, Weight]]) -> dict[str, dict[str, list[float]]]:
    plain: dict[str, dict[str, list[float]]] = {}
    for part, by_place in weights.items():
        plain[part] = {str(place): list(weight) for place, weight in by_place.items()}
    return plain


def _weights_from_json(plain: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Mapping[int, Weight]]:
    weights: dict[str, Mapping[int, Weight]] = {}
    for part, by_place in plain.items():
        weights[part] = {int(place): (mean, variance) for place, (mean, variance) in by_place.items()}
    return weights


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
    """Return the mean and the variance of what a part adds to the log-odds of this request. For a worker that answers
    they are those of both beliefs about it, weighed by their probabilities."""
    mean, variance = _sum_of_inputs(posterior.weights.get(part, {}), part, features)
    possible = posterior.possible
    if possible is None or not possible.evidence or not part.startswith(ANSWERING):
        return mean, variance
    probability = possible.probability * possible.share(part)
    if_changed = _weights_if_changed(posterior.weights, possible, part, features)
    mean_if_changed, variance_if_changed = _sum_of_inputs(if_changed, part, features)
    difference = mean_if_changed - mean
    variance += probability * (variance_if_changed - variance) + probability * (1 - probability) * difference**2
    return mean + probability * difference, variance


def _weights_if_changed(
    usual: Mapping[str, Mapping[int, Weight]], possible: PossibleChange, part: str, features: Features
) -> dict[int, Weight]:
    """Return the weights of a part that a request has an input for, as they are if the worker has changed."""
    before, since = usual.get(part, {}), possible.weights.get(part, {})
    weights: dict[int, Weight] = {}
    for place, _, prior in _inputs(part, features):
        if place in since:
            weights[place] = since[place]
        else:
            weights[place] = _weight_if_changed(before.get(place, (0.0, prior)), prior)
    return weights


def _weight_if_changed(weight: Weight, prior: float) -> Weight:
    """Return a weight as it is when its worker has just changed: over a wider prior, with a share of its ratings."""
    mean, variance = weight
    precision = 1 / (WIDER_IF_CHANGED * prior) + KEPT_SHARE * (1 / variance - 1 / prior)
    return KEPT_SHARE * mean / variance / precision, 1 / precision


def _sum_of_inputs(weights: Mapping[int, Weight], part: str, features: Features) -> Weight:
    """Return the mean and the variance of the sum of a part's inputs, each multiplied by its weight."""
    mean = variance = 0.0
    for place, value, prior in _inputs(part, features):
        weight, spread = weights.get(place, (0.0, prior))
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


class Estimate(Struct, frozen=True):
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
    parts = {part: belief_about(posterior, learned_part(posterior, part, models), features) for part in names}
    base = FIRST_LOG_ODDS + belief_about(posterior, "base", features)[0]
    cards = _cards_as_known(posterior, workers, models, features)
    prices = {worker.name: worker.price for worker in workers}
    estimated = []
    for arm in arms:
        added = [parts[part] for part in arm.parts]
        mean = base + cards.get(arm.main, 0.0) + sum([mean for mean, _ in added])
        deviation = math.sqrt(sum([variance for _, variance in added]))
        usd = bill(posterior, arm, prices, models)
        estimated.append(Estimate(arm, mean, deviation, _share_of_worth_left(spec, spent + usd), usd))
    return tuple(estimated)


def _share_of_worth_left(spec: SelectorSpec, usd: float) -> float:
    """Return the part of an answer's worth that is left when these micro-dollars are paid for it."""
    if not spec.full_usd:
        return 1.0
    return 1 - spec.cost * min(1.0, usd / spec.full_usd)


def learned_part(posterior: Posterior, part: str, models: Mapping[str, str]) -> str:
    """Return the name under which a part is learned: a worker's with its model, so that a worker whose model is
    replaced in the pool file is somebody else, or another worker's where the two have exchanged."""
    role, _, worker = part.partition(":")
    if worker in models:
        return f"{role}:{posterior.exchanges.name(f'{worker}={models[worker]}')}"
    return part


def _cards_as_known(
    posterior: Posterior, workers: Sequence[Worker], models: Mapping[str, str], features: Features
) -> dict[str, float]:
    """Return the prior log-odds of each worker, by the card of the one under whose name it is known."""
    own = card_log_odds(workers, features)
    by_known_name = {f"{name}={models[name]}": card for name, card in own.items()}
    cards = {}
    for name, card in own.items():
        cards[name] = by_known_name.get(posterior.exchanges.name(f"{name}={models[name]}"), card)
    return cards


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


class Rating(Struct, frozen=True):
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
    models: Mapping[str, str] = {}
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

    @property
    def kind(self) -> tuple[str, str]:
        """Return the part, and whether the input is a word, the bias, a count or a number of an embedding's vector."""
        if self.place < BIAS:
            return self.part, "word"
        if self.place == BIAS:
            return self.part, "bias"
        if self.place < VECTORS:
            return self.part, "count"
        return self.part, "vector"


class _Prediction(NamedTuple):
    """The probability that an answer would be rated right, as the selector held it before the rating."""

    chance: float
    """The probability of a right answer."""
    spread: float
    """The variance of its log-odds."""


def update_posterior(posterior: Posterior, spec: SelectorSpec, workers: Sequence[Worker], rating: Rating) -> Posterior:
    """Return the posterior after one more rating: one step of assumed-density filtering."""
    posterior = fade_posterior(posterior, spec.decay, rating.at)
    models = {**{worker.name: worker.model for worker in workers}, **rating.models}
    parts = ["base", *[learned_part(posterior, part, models) for part in rating.arm.parts]]
    cards = _cards_as_known(posterior, workers, models, rating.seen)
    first = FIRST_LOG_ODDS + cards.get(rating.arm.main, 0.0)
    terms = _terms(posterior.weights, parts, rating.seen)
    prediction = _predict(first, terms)
    answering = parts[1]
    possible = posterior.possible or PossibleChange()
    others = [term for term in terms if term.part != answering]
    if_changed = _weights_if_changed(posterior.weights, possible, answering, rating.seen)
    terms_if_changed = _terms({answering: if_changed}, [answering], rating.seen)
    prediction_if_changed = _predict(first, [*others, *terms_if_changed])
    weights = _update_weights(posterior.weights, terms, rating, prediction)
    weights_if_changed = _update_weights(
        possible.weights, terms_if_changed, rating, prediction_if_changed, few_ratings=True
    )
    if rating.before is not None:
        if answering in possible.evidence:
            possible = replace(possible, weights=weights_if_changed)
        return replace(posterior, weights=weights, possible=possible)
    gain = EVIDENCE_FACTOR * (_log_likelihood(prediction_if_changed, rating) - _log_likelihood(prediction, rating))
    evidence = {**possible.evidence, answering: possible.evidence.get(answering, 0.0) + gain}
    bills, ratio = _add_bill(posterior, workers, rating, models)
    exchanges = posterior.exchanges
    if rating.arm.main in cards and posterior.ratings >= FIRST_RATINGS:
        likelihoods = _log_likelihoods_if_exchanged(posterior, rating, others, cards, models)
        expected = _log_likelihood(prediction, rating)
        gains = {worker: likelihood - expected for worker, likelihood in likelihoods.items()}
        exchanges = exchanges.after(f"{rating.arm.main}={models[rating.arm.main]}", gains)
    ratings = posterior.ratings + 1
    after = replace(posterior, weights=weights, bills=bills, ratio=ratio, ratings=ratings, exchanges=exchanges)
    if exchanges.names != posterior.exchanges.names:
        return replace(after, possible=PossibleChange(), changes=posterior.changes + 1)
    return _settle(after, PossibleChange(weights_if_changed, evidence, possible.ratings + rating.weight))


def _log_likelihoods_if_exchanged(
    posterior: Posterior, rating: Rating, others: Sequence[_Term], cards: Mapping[str, float], models: Mapping[str, str]
) -> dict[str, float]:
    """Return the log likelihood of a rating as if the worker that answered were another one, for each other worker with
    its model. `others` are the terms without those of the worker that answered."""
    likelihoods = {}
    for name, card in cards.items():
        if name != rating.arm.main:
            part = learned_part(posterior, ANSWERING + name, models)
            terms = [*others, *_terms(posterior.weights, [part], rating.seen)]
            likelihoods[f"{name}={models[name]}"] = _log_likelihood(_predict(FIRST_LOG_ODDS + card, terms), rating)
    return likelihoods


def _terms(weights: Mapping[str, Mapping[int, Weight]], parts: Sequence[str], features: Features) -> list[_Term]:
    """Return the weights of these parts that a request has an input for."""
    terms = []
    for part in parts:
        known = weights.get(part, {})
        for place, value, prior in _inputs(part, features):
            mean, variance = known.get(place, (0.0, prior))
            terms.append(_Term(part, place, value, mean, variance))
    return terms


def _predict(first: float, terms: Sequence[_Term]) -> _Prediction:
    """Return the prediction of terms that are added to the log-odds `first`."""
    mean = first + sum([term.value * term.mean for term in terms])
    spread = sum([term.value * term.value * term.variance for term in terms])
    return _Prediction(logistic(mean / math.sqrt(1 + math.pi * spread / 8)), spread)


def _update_weights(
    weights: Mapping[str, Mapping[int, Weight]],
    terms: Sequence[_Term],
    rating: Rating,
    prediction: _Prediction,
    *,
    few_ratings: bool = False,
) -> dict[str, Mapping[int, Weight]]:
    """Return all weights. Those of the terms move by the difference between a rating and its prediction, each as far
    as its own variance goes. A first rating reduces the variances as well: each as if its weight were the only one of
    its kind, or with `few_ratings` by its own input only, so that the next ratings still move it far."""
    chance, spread = prediction
    certainty = chance * (1 - chance) * rating.weight
    compared = chance if rating.before is None else rating.before
    surprise = (rating.score - compared) * rating.weight
    moved = {term.part: dict(weights.get(term.part, {})) for term in terms}
    squares: dict[tuple[str, str], float] = {}
    for term in terms:
        squares[term.kind] = squares.get(term.kind, 0.0) + term.value * term.value
    for term in terms:
        gain = term.value * term.variance / (1 + spread * certainty)
        variance = term.variance
        if rating.before is None and few_ratings:
            variance *= 1 - term.value * gain * certainty
        elif rating.before is None:
            variance /= 1 + variance * squares[term.kind] * certainty
        moved[term.part][term.place] = (term.mean + gain * surprise, variance)
    return {**weights, **moved}


def _log_likelihood(prediction: _Prediction, rating: Rating) -> float:
    """Return the log likelihood of a rating. No single one decides: certain predictions are limited."""
    chance = min(max(prediction.chance, 0.02), 0.98)
    return rating.weight * (rating.score * math.log(chance) + (1 - rating.score) * math.log(1 - chance))


def _settle(posterior: Posterior, possible: PossibleChange) -> Posterior:
    """Return the posterior with this possible change, or with its end.

    Where its evidence is below zero, a later moment is more probable, and the next rating begins another one. After
    `RATINGS_UNTIL_SETTLED` ratings the workers that have more probably changed keep the beliefs as if they had.
    """
    if possible.total_evidence < 0:
        return replace(posterior, possible=PossibleChange())
    if possible.ratings < RATINGS_UNTIL_SETTLED:
        return replace(posterior, possible=possible)
    changed: set[str] = set()
    if possible.probability > 0.5:
        changed = {part.removeprefix(ANSWERING) for part in possible.evidence if possible.share(part) > 0.5}
    weights = dict(posterior.weights)
    for part, by_place in posterior.weights.items():
        if part.partition(":")[2] in changed:
            weights[part] = _settle_part(part, by_place, possible.weights.get(part, {}))
    changes = posterior.changes + len(changed)
    return replace(posterior, weights=weights, possible=PossibleChange(), changes=changes)


def _settle_part(part: str, before: Mapping[int, Weight], since: Mapping[int, Weight]) -> dict[int, Weight]:
    """Return the weights of a part of a worker that has changed. None stays wider than its prior: the parts of tenants
    are joined as if ratings had only added to a prior."""
    prior = prior_of(part)
    settled: dict[int, Weight] = {}
    for place, weight in before.items():
        usual = spread_of(prior, place)
        mean, variance = since[place] if place in since else _weight_if_changed(weight, usual)
        settled[place] = (mean, min(variance, usual))
    return settled


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


def fade_posterior(posterior: Posterior, decay: float, now: float) -> Posterior:
    """Return the posterior in which what it knows counts less, by the days since it last faded."""
    if not posterior.at:
        return replace(posterior, at=now)
    if now - posterior.at < FADE_SECONDS:
        return posterior
    share = decay ** ((now - posterior.at) / 86_400)
    bills = {arm: (count * share, mean) for arm, (count, mean) in posterior.bills.items()}
    ratio = (posterior.ratio[0] * share, posterior.ratio[1])
    weights, possible = _fade_weights(posterior.weights, share), fade_possible_change(posterior.possible, share)
    exchanges = posterior.exchanges.fade(share)
    return replace(posterior, weights=weights, bills=bills, ratio=ratio, at=now, possible=possible, exchanges=exchanges)


def fade_possible_change(possible: PossibleChange | None, share: float) -> PossibleChange | None:
    """Return a possible change of which a share is kept."""
    if possible is None:
        return None
    evidence = {part: ratio * share for part, ratio in possible.evidence.items()}
    return replace(possible, weights=_fade_weights(possible.weights, share, WIDER_IF_CHANGED), evidence=evidence)


def _fade_weights(
    weights: Mapping[str, Mapping[int, Weight]], share: float, wider: float = 1.0
) -> dict[str, Mapping[int, Weight]]:
    """Return weights in which what the ratings have added counts by `share`, over priors that are `wider` times as
    wide."""
    kept: dict[str, Mapping[int, Weight]] = {}
    for part, by_place in weights.items():
        faded: dict[int, Weight] = {}
        for place, weight in by_place.items():
            faded[place] = _fade_weight(weight, wider * spread_of(prior_of(part), place), share)
        kept[part] = faded
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


def log_odds(probability: float) -> float:
    """Return the log-odds of a probability; the inverse of `logistic`."""
    return math.log(probability / (1 - probability))
