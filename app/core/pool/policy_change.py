"""Proves that a new pool file shows nothing to anybody who did not see it under the old one, or gives a witness.

The space is finite and is enumerated: every set of the labels that either file names, for every tier and every
recipient. Labels that neither file names need no enumeration, because nobody is cleared for them. Where a file names
sources (`rules.py`), every set of those is enumerated as well.

Two things are compared: what a recipient may read itself, and what it may be shown of that which others make of a
conversation with these labels. So a new worker that declassifies labels is a widening if it brings anybody to see what
is derived from them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from app.core.pool.catalog import Catalog, Tier, Worker
from app.core.pool.policy import exclusion
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
    embedder = None
    if conductor.selector is not None:
        embedder = conductor.selector.embedder
    roles = [("worker", name) for name in dict.fromkeys((*tier.pool, tier.fallback))]
    roles += [("conductor", name) for name in (conductor.worker, *_conductors(catalog)) if name is not None]
    roles += [("embedder", name) for name in (embedder,) if name is not None]
    return {_recipient(catalog, role, name): catalog.workers[name] for role, name in roles}


def _conductors(catalog: Catalog) -> tuple[str, ...]:
    """Return the models that may conduct in arms of any tier, where arms are served."""
    if not catalog.evaluation.arms:
        return ()
    return catalog.evaluation.conductors


def _recipient(catalog: Catalog, role: str, name: str) -> Recipient:
    provider = catalog.providers[catalog.workers[name].provider]
    addresses = tuple(endpoint.base_url for endpoint in provider.endpoints) or (provider.base_url,)
    return Recipient(role, name, provider.name, addresses)


def widenings(old: Catalog, new: Catalog) -> Iterator[Widening]:
    """Yield one witness, with as few labels as possible, for each tier and recipient that is shown more.

    No witness is a proof that nothing is. A tier that the old file does not have is compared with all of its tiers
    together. Raises `ConfigInvalid` for more than `MOST_LABELS` labels.
    """
    bits = Bits(labels_of(old, new))
    before = {name: _compiled(bits, old, tier) for name, tier in old.tiers.items()}
    derives = _derives(old) or _derives(new)
    for name, tier in new.tiers.items():
        compared = [before[name]] if name in before else list(before.values())
        now, left = _compiled(bits, new, tier), list[Recipient]()
        if any(_same(now, before) for before in compared):
            continue
        for recipient, reader in now.items():
            earlier = [known[recipient] for known in compared if recipient in known]
            witness = _witness(bits, recipient.role, reader, earlier)
            if witness is not None:
                yield Widening(name, recipient, bits.names(witness), _reason(earlier, bits.reading(witness)))
            elif recipient.role == "worker" and derives:
                left.append(recipient)
        yield from _derived(bits, name, left, now, compared)


class Bits:
    """Sets of labels and sources as whole numbers with a bit for each, so that many sets are compared quickly."""

    def __init__(self, labels: Sequence[str]) -> None:
        """`labels` are all labels, and the sources that rules name. Raises `ConfigInvalid` if they are too many."""
        if len(labels) > MOST_LABELS:
            named = f"the two files name {len(labels)} labels"
            raise ConfigInvalid([f"{named}, and the sets of at most {MOST_LABELS} can be enumerated; name fewer"])
        every = dict.fromkeys((*labels, *sorted(SOURCES)))
        self._bit = {name: 1 << place for place, name in enumerate(every)}
        self.enumerated = self.of(labels)
        self.labels = self.of(set(labels) - SOURCES)

    def of(self, names: Iterable[str]) -> int:
        """Return the set of those names that are known."""
        return sum(self._bit[name] for name in set(names) if name in self._bit)

    def names(self, chosen: int) -> tuple[str, ...]:
        """Return the names of a set, labels first."""
        return tuple(name for name, bit in self._bit.items() if chosen & bit)

    def reading(self, chosen: int) -> Reading:
        """Return a set as what is read."""
        named = frozenset(self.names(chosen))
        return Reading(named - SOURCES, named & SOURCES)


@record(frozen=True, slots=True)
class Permissions:
    """A recipient's permissions: the labels that it is not cleared for, the sets that rules keep from it, and those
    labels of what it reads that its output keeps."""

    worker: Worker
    uncleared: int
    barred: tuple[int, ...]
    kept: int

    def may(self, read: int) -> bool:
        """Return whether it may read this set."""
        return not read & self.uncleared and (not self.barred or all(bar & read != bar for bar in self.barred))


Readers = Mapping[Recipient, Permissions]


def _compiled(bits: Bits, catalog: Catalog, tier: Tier) -> Readers:
    found = {}
    for recipient, worker in recipients(catalog, tier).items():
        uncleared = bits.labels & ~bits.of(worker.card.cleared)
        barred = tuple(bits.of(bar.labels) for bar in worker.bars)
        found[recipient] = Permissions(worker, uncleared, barred, bits.labels & ~bits.of(worker.declassifies))
    return found


def _same(new: Readers, old: Readers) -> bool:
    """Return True if the same recipients have the same permissions."""
    return _permissions(new) == _permissions(old)


def _permissions(readers: Readers) -> Mapping[Recipient, tuple[int, tuple[int, ...], int]]:
    return {who: (reader.uncleared, reader.barred, reader.kept) for who, reader in readers.items()}


def _derives(catalog: Catalog) -> bool:
    """Return True if words that are made of others can be shown to more recipients than these."""
    if any(worker.declassifies for worker in catalog.workers.values()):
        return True
    return any(not rule.labels.isdisjoint(SOURCES) for rule in catalog.rules)


def _witness(bits: Bits, role: str, reader: Permissions, earlier: Sequence[Permissions]) -> int | None:
    """Return the smallest set of labels and sources that a recipient may read, and none of its earlier forms might, if
    there is one. Conductors and embedders always read the conversation."""
    always = bits.of({CALLER}) if role != "worker" else 0
    for chosen in _subsets(bits.enumerated & ~reader.uncleared):
        read = chosen | always
        if reader.may(read) and not any(known.may(read) for known in earlier):
            return chosen
    return None


def _derived(
    bits: Bits, name: str, left: Sequence[Recipient], now: Readers, compared: Sequence[Readers]
) -> Iterator[Widening]:
    """Yield a witness for each recipient that is shown more of what others make of a conversation."""
    waiting = list(left)
    for chosen in _subsets(bits.labels) if waiting else ():
        made = words(bits, now, chosen)
        made_before = [known for reader in compared for known in words(bits, reader, chosen)]
        for recipient in tuple(waiting):
            earlier = [known[recipient] for known in compared if recipient in known]
            shown = next((read for read in made if now[recipient].may(read)), None)
            if shown is None or any(reader.may(read) for reader in earlier for read in made_before):
                continue
            waiting.remove(recipient)
            reason = _reason(earlier, bits.reading(chosen | bits.of({CALLER})))
            through = tuple(reader.worker.name for reader in made[shown])
            yield Widening(name, recipient, bits.names(chosen), reason or "nothing of it was shown to it", through)


def words(bits: Bits, readers: Readers, labels: int) -> Mapping[int, tuple[Permissions, ...]]:
    """Return all that can be made of a conversation with these labels, as it is read, each with those who made it."""
    start, step, planned = labels | bits.of({CALLER}), bits.of({STEP}), bits.of({CONDUCTOR})
    found: dict[int, tuple[Permissions, ...]] = {start: ()}
    for recipient, reader in readers.items():
        if recipient.role == "conductor" and reader.may(start):
            found.setdefault(start & reader.kept | planned, (reader,))
    workers = [reader for recipient, reader in readers.items() if recipient.role == "worker"]
    queue = list(found)
    for read in queue:
        for reader in workers:
            made = read & reader.kept | step
            if made not in found and reader.may(read):
                found[made] = (*found[read], reader)
                queue.append(made)
    return found


def _subsets(whole: int) -> Iterator[int]:
    """Yield all subsets, small ones first."""
    places = [1 << place for place in range(whole.bit_length()) if whole >> place & 1]
    for size in range(len(places) + 1):
        yield from map(sum, combinations(places, size))


def _reason(earlier: Sequence[Permissions], read: Reading) -> str:
    if not earlier:
        return "it was not a recipient of this tier"
    return exclusion(earlier[0].worker, read)
