"""Proves that a new pool file shows nothing to anybody who did not see it under the old one, or gives a witness.

The space is finite and is enumerated: every set of the labels that either file names, for every tier and every
recipient. Labels that neither file names need no enumeration, because nobody is cleared for them. Where a file names
sources (`rules.py`), every set of those is enumerated as well.

Two things are compared: what a recipient may read itself, and what it may be shown of that which others make of a
conversation with these labels. So a new worker that declassifies labels is a widening if it brings anybody to see what
is derived from them.
"""

from collections.abc import Iterator, Mapping, Sequence

from app.core.pool.catalog import Catalog, Tier, Worker
from app.core.pool.policy import exclusion, permits
from app.core.pool.rules import CALLER, CONDUCTOR, SOURCES, STEP, Reading
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
    """A witness: under the new file this recipient may read words of this tier with exactly these labels and sources,
    and under the old file it may not."""

    tier: str
    recipient: Recipient
    labels: tuple[str, ...]
    reason: str
    """The reason why the old file did not show them."""
    through: tuple[str, ...] = ()
    """If it is what others make of a conversation with these labels: they, in their order; the last one wrote it."""


def labels_of(*catalogs: Catalog) -> tuple[str, ...]:
    """Return the labels that the catalogs name, sorted: in rules, in clearances, and by regions and retentions; and the
    sources that rules name."""
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
    derives = _derives(old) or _derives(new)
    for name, tier in new.tiers.items():
        compared = {name: before[name]} if name in before else before
        left: dict[Recipient, tuple[Worker, list[Worker]]] = {}
        for recipient, worker in recipients(new, tier).items():
            earlier = [known[recipient] for known in compared.values() if recipient in known]
            witness = _witness(recipient.role, worker, earlier, labels)
            if witness is not None:
                yield Widening(name, recipient, witness, _reason(earlier, _read(witness)))
            elif recipient.role == "worker" and derives:
                left[recipient] = worker, earlier
        if left:
            old_tiers = [old.tiers[one] for one in compared]
            yield from _derived(name, left, (new, tier), [(old, one) for one in old_tiers], labels)


def _derives(catalog: Catalog) -> bool:
    """True if words that are made of others can be shown to more recipients than these."""
    if any(worker.declassifies for worker in catalog.workers.values()):
        return True
    return any(not rule.labels.isdisjoint(SOURCES) for rule in catalog.rules)


def _witness(role: str, worker: Worker, earlier: Sequence[Worker], labels: Sequence[str]) -> tuple[str, ...] | None:
    """Return the smallest set of labels and sources that the worker may read, and none of its earlier forms might; None
    if there is none. Conductors and embedders always read the conversation."""
    cleared = [label for label in labels if label in worker.card.cleared or label in SOURCES]
    for chosen in _subsets(cleared):
        found = _read(chosen)
        if role != "worker":
            found |= Reading(sources=frozenset({CALLER}))
        if permits(worker, found) and not any(permits(one, found) for one in earlier):
            return chosen
    return None


Place = tuple[Catalog, Tier]


def _derived(
    name: str,
    left: Mapping[Recipient, tuple[Worker, list[Worker]]],
    new: Place,
    old: Sequence[Place],
    labels: Sequence[str],
) -> Iterator[Widening]:
    """Yield a witness for each recipient that is shown more of what others make of a conversation."""
    waiting = dict(left)
    for chosen in _subsets([label for label in labels if label not in SOURCES]):
        now = words(*new, frozenset(chosen))
        then = [known for place in old for known in words(*place, frozenset(chosen))]
        for recipient, (worker, earlier) in list(waiting.items()):
            shown = next((read for read in now if permits(worker, read)), None)
            if shown is None or any(permits(one, read) for one in earlier for read in then):
                continue
            del waiting[recipient]
            reason = _reason(earlier, Reading(frozenset(chosen), frozenset({CALLER})))
            yield Widening(name, recipient, chosen, reason or "nothing of it was shown to it", now[shown])


def words(catalog: Catalog, tier: Tier, labels: frozenset[str]) -> Mapping[Reading, tuple[str, ...]]:
    """Return all that can be made of a conversation with these labels, as it is read, each with those who made it."""
    known = recipients(catalog, tier)
    start = Reading(labels, frozenset({CALLER}))
    found: dict[Reading, tuple[str, ...]] = {start: ()}
    for recipient, model in known.items():
        if recipient.role == "conductor" and permits(model, start):
            found.setdefault(Reading(labels - model.declassifies, frozenset({CONDUCTOR})), (model.name,))
    workers = [worker for recipient, worker in known.items() if recipient.role == "worker"]
    queue = list(found)
    for read in queue:
        for worker in workers:
            made = Reading(read.labels - worker.declassifies, frozenset({STEP}))
            if made not in found and permits(worker, read):
                found[made] = (*found[read], worker.name)
                queue.append(made)
    return found


def _read(chosen: Sequence[str]) -> Reading:
    """The reading that a set of labels and sources stands for."""
    named = frozenset(chosen)
    return Reading(named - SOURCES, named & SOURCES)


def _subsets(labels: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield all subsets, small ones first."""
    places = sorted(range(1 << len(labels)), key=int.bit_count)
    for places_taken in places:
        yield tuple(label for place, label in enumerate(labels) if places_taken >> place & 1)


def _reason(earlier: Sequence[Worker], read: Reading) -> str:
    return exclusion(earlier[0], read) if earlier else "it was not a recipient of this tier"
