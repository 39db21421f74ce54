"""The part of a selector's beliefs that belongs to one tenant.

All tenants of a tier begin with the shared posterior, which is learned from trials of workers and from the ratings of
the tenants that the pool file trusts. The ratings of any other tenant stay with it: for each weight that they moved,
its own part holds what they added to the precision and to the product of precision and mean. `join_posteriors` adds
both up, which is the posterior under the shared one as its prior. So no rating changes the beliefs by which another
tenant's requests are decided. An own part is a `Posterior` whose weights are such pairs of (product, precision).
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from app.core.pool.catalog import SelectorSpec, Worker
from app.core.rating.posterior import (
    FADE_SECONDS,
    Posterior,
    Rating,
    Weight,
    fade_possible_change,
    fade_posterior,
    prior_of,
    spread_of,
    update_posterior,
)


def join_posteriors(shared: Posterior, own: Posterior) -> Posterior:
    """Return the posterior of a tenant: the shared one with what the tenant's ratings added."""
    weights = dict(shared.weights)
    for part, added in own.weights.items():
        known, prior = shared.weights.get(part, {}), prior_of(part)
        whole = dict(known)
        for place, (product, precision) in added.items():
            spread = spread_of(prior, place)
            mean, variance = known.get(place, (0.0, spread))
            total = max(1 / variance + precision, 1 / spread)
            whole[place] = ((mean / variance + product) / total, 1 / total)
        weights[part] = whole
    return Posterior(
        weights=weights,
        bills={**shared.bills, **own.bills},
        ratio=own.ratio if own.ratio[0] else shared.ratio,
        ratings=shared.ratings + own.ratings,
        at=max(shared.at, own.at),
        possible=shared.possible if own.possible is None else own.possible,
        changes=shared.changes + own.changes,
        exchanges=shared.exchanges.join(own.exchanges),
    )


def update_own_part(
    shared: Posterior, own: Posterior, spec: SelectorSpec, workers: Sequence[Worker], ratings: Sequence[Rating]
) -> Posterior:
    """Return the own part of a tenant after more of its ratings, in the order of their times."""
    base = whole = None
    for rating in ratings:
        if base is None or whole is None or rating.at - whole.at >= FADE_SECONDS:
            if base is not None and whole is not None:
                own = _extract_own_part(base, whole)
            base = replace(fade_posterior(shared, spec.decay, rating.at), at=max(rating.at, own.at))
            whole = replace(join_posteriors(base, fade_own_part(own, spec.decay, rating.at)), at=base.at)
        whole = update_posterior(whole, spec, workers, rating)
    if base is None or whole is None:
        return own
    return _extract_own_part(base, whole)


def _extract_own_part(base: Posterior, whole: Posterior) -> Posterior:
    """Return the own part that makes `whole` of `base`; the inverse of `join_posteriors`."""
    weights: dict[str, Mapping[int, Weight]] = {}
    for part, of in whole.weights.items():
        known = base.weights.get(part, {})
        if of is known:
            continue
        differences = _differences(part, known, of)
        if differences:
            weights[part] = differences
    return Posterior(
        weights=weights,
        bills={arm: bill for arm, bill in whole.bills.items() if base.bills.get(arm) != bill},
        ratio=whole.ratio if whole.ratio != base.ratio else (0.0, 1.0),
        ratings=whole.ratings - base.ratings,
        at=whole.at,
        possible=whole.possible if whole.possible != base.possible else None,
        changes=whole.changes - base.changes,
        exchanges=whole.exchanges.extract(base.exchanges),
    )


def _differences(part: str, known: Mapping[int, Weight], weights: Mapping[int, Weight]) -> dict[int, Weight]:
    prior = prior_of(part)
    found = {}
    for place, (mean, variance) in weights.items():
        before, spread = known.get(place, (0.0, spread_of(prior, place)))
        if (mean, variance) != (before, spread):
            found[place] = (mean / variance - before / spread, 1 / variance - 1 / spread)
    return found


def fade_own_part(own: Posterior, decay: float, now: float) -> Posterior:
    """Return the own part of a tenant with what it knows counting less, by the days since it last faded."""
    if not own.at or now - own.at < FADE_SECONDS:
        return own
    share = decay ** ((now - own.at) / 86_400)
    weights = {part: _scale(of, share) for part, of in own.weights.items()}
    bills = {arm: (count * share, mean) for arm, (count, mean) in own.bills.items()}
    ratio, possible = (own.ratio[0] * share, own.ratio[1]), fade_possible_change(own.possible, share)
    exchanges = own.exchanges.fade(share)
    return replace(own, weights=weights, bills=bills, ratio=ratio, at=now, possible=possible, exchanges=exchanges)


def _scale(weights: Mapping[int, Weight], share: float) -> dict[int, Weight]:
    return {place: (product * share, precision * share) for place, (product, precision) in weights.items()}
