"""Proves that a new pool file shows nothing to anybody who did not see it under the old one, or gives a witness.

The space is finite and is enumerated: every set of the labels that either file names, for every tier and every
recipient. Labels that neither file names need no enumeration, because nobody is cleared for them.
"""

from collections.abc import Iterator, Mapping, Sequence

from app.core.pool.catalog import Catalog, Tier, Worker
from app.core.pool.policy import exclusion
from app.core.records import record
from app.errors import ConfigInvalid

MOST_LABELS = 16
"""Labels whose sets are enumerated, at most: 65,536 sets for each recipient."""


@record(frozen=True, slots=True)
class Recipient:
    """Somebody who is shown a tier's requests. A worker that moves to another address is another recipient."""

    role: str
    """`worker` is shown what its access list grants; `conductor` and `embedder` are shown the whole task."""
    worker: str
    provider: str
    addresses: tuple[str, ...]


@record(frozen=True, slots=True)
class Widening:
    """A witness: under the new file, requests of this tier with exactly these labels are shown to this recipient, and
    under the old file they are not."""

    tier: str
    recipient: Recipient
    labels: tuple[str, ...]
    reason: str
    """The reason why the old file did not show them."""


def labels_of(*catalogs: Catalog) -> tuple[str, ...]:
    """Return the labels that the catalogs name, sorted: in rules, in clearances, and by regions and retentions."""
    named: set[str] = set()
    for catalog in catalogs:
        for rule in catalog.rules:
            named |= rule.labels
        for worker in catalog.workers.values():
            named |= worker.card.cleared
    return tuple(sorted(named))


def recipients(catalog: Catalog, tier: Tier) -> Mapping[Recipient, Worker]:
    """Return everybody who may be shown the tier's requests, each in its role."""
    conductor = tier.conductor
    embedder = conductor.selector.embedder if conductor.selector is not None else None
    roles = [("worker", name) for name in dict.fromkeys((*tier.pool, tier.fallback))]
    roles += [("conductor", name) for name in (conductor.worker, *_conductors(catalog)) if name is not None]
    roles += [("embedder", name) for name in (embedder,) if name is not None]
    return {_recipient(catalog, role, name): catalog.workers[name] for role, name in roles}


def _conductors(catalog: Catalog) -> tuple[str, ...]:
    """The models that may conduct in arms of any tier, where arms are served."""
    return catalog.evaluation.conductors if catalog.evaluation.arms else ()


def _recipient(catalog: Catalog, role: str, name: str) -> Recipient:
    provider = catalog.providers[catalog.workers[name].provider]
    addresses = tuple(one.base_url for one in provider.endpoints) or (provider.base_url,)
    return Recipient(role, name, provider.name, addresses)


def widenings(old: Catalog, new: Catalog) -> Iterator[Widening]:
    """Yield one witness, with as few labels as possible, for each tier and recipient that is shown more.

    No witness is a proof that nothing is. A tier that the old file does not have is compared with all of its tiers
    together. Raises `ConfigInvalid` for more than `MOST_LABELS` labels.
    """
    labels = labels_of(old, new)
    if len(labels) > MOST_LABELS:
        named = f"the two files name {len(labels)} labels"
        raise ConfigInvalid([f"{named}, and the sets of at most {MOST_LABELS} can be enumerated; name fewer"])
    before = {name: recipients(old, tier) for name, tier in old.tiers.items()}
    for name, tier in new.tiers.items():
        compared = [before[name]] if name in before else list(before.values())
        for recipient, worker in recipients(new, tier).items():
            earlier = [known[recipient] for known in compared if recipient in known]
            witness = _witness(worker, earlier, labels)
            if witness is not None:
                yield Widening(name, recipient, witness, _reason(earlier, frozenset(witness)))


def _witness(worker: Worker, earlier: Sequence[Worker], labels: Sequence[str]) -> tuple[str, ...] | None:
    """Return the smallest set of labels that the worker may see, and none of its earlier forms might; None if there is
    none."""
    cleared = [label for label in labels if label in worker.card.cleared]
    for chosen in _subsets(cleared):
        found = frozenset(chosen)
        if not exclusion(worker, found) and all(exclusion(one, found) for one in earlier):
            return chosen
    return None


def _subsets(labels: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield all subsets, small ones first."""
    places = sorted(range(1 << len(labels)), key=int.bit_count)
    for places_taken in places:
        yield tuple(label for place, label in enumerate(labels) if places_taken >> place & 1)


def _reason(earlier: Sequence[Worker], labels: frozenset[str]) -> str:
    return exclusion(earlier[0], labels) if earlier else "it was not a recipient of this tier"
