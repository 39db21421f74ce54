"""Proves that a new pool file shows nothing to anybody who did not see it under the old one, or gives a witness.

The space is finite and is enumerated: every set of the labels that either file names, for every tier and every
recipient. Labels that neither file names need no enumeration, because nobody is cleared for them. Where a file names
sources (`rules.py`), every set of those is enumerated as well.

The recipients of a tier are those of its own runs, and those who carry out the shadows of these runs.

Two things are compared: what a recipient may read itself, and what it may be shown of that which others make of a
conversation with these labels. So a new worker that declassifies labels is a widening if it brings anybody to see what
is derived from them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations

from msgspec import Struct

from app.core.pool.catalog import Catalog, Tier, Worker
from app.core.pool.policy import exclusion
from app.core.pool.rules import CALLER, CONDUCTOR, SOURCES, STEP, Reading
from app.core.pool.serving import definition
from app.errors import ConfigInvalid

MOST_LABELS = 16
"""Labels whose sets are enumerated, at most: 65,536 sets for each recipient."""


class Recipient(Struct, frozen=True):
    """Somebody who is shown a tier's requests. A worker that moves to another address is another recipient."""

    role: str
    """`worker` is shown what its access list grants; `conductor` and `embedder` are shown the whole task."""
    worker: str
    provider: str
    addresses: tuple[str, ...]


class Widening(Struct, frozen=True):
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
    names: set[str] = set()
    for catalog in catalogs:
        for rule in catalog.rules:
            names |= rule.labels
        for worker in catalog.workers.values():
            names |= worker.card.cleared
    return tuple(sorted(names))


def recipients(catalog: Catalog, tier: Tier) -> Mapping[Recipient, Worker]:
    """Return everybody who may be shown the tier's requests, each in its role."""
    everybody: dict[Recipient, Worker] = {}
    for group in _groups_of_recipients(catalog, tier):
        everybody.update(group)
    return everybody


def _groups_of_recipients(catalog: Catalog, tier: Tier) -> list[Mapping[Recipient, Worker]]:
    """Return the recipients of the tier's own runs, and those of the shadows of these runs where it has a shadow. What
    the ones write is not shown to the others."""
    groups = [_recipients_of(catalog, tier)]
    shadow = tier.shadow
    subject = definition(catalog, tier, shadow.subject) if shadow is not None else None
    if shadow is None or subject is None:  # a version of the tier's own conductor is no further recipient
        return groups
    group = _recipients_of(catalog, subject)
    if shadow.mode == "plan":
        group = {recipient: worker for recipient, worker in group.items() if recipient.role != "worker"}
    return [*groups, group]


def _recipients_of(catalog: Catalog, tier: Tier) -> Mapping[Recipient, Worker]:
    conductor = tier.conductor
    roles = [("worker", name) for name in (*tier.pool, tier.fallback)]
    if conductor.worker is not None:
        roles.append(("conductor", conductor.worker))
    roles += [("conductor", name) for name in _conductors(catalog)]
    if conductor.selector is not None and conductor.selector.embedder is not None:
        roles.append(("embedder", conductor.selector.embedder))
    workers: dict[Recipient, Worker] = {}
    for role, name in roles:
        workers[_recipient(catalog, role, name)] = catalog.workers[name]
    return workers


def _conductors(catalog: Catalog) -> tuple[str, ...]:
    """Return the models that may conduct in arms of any tier, where arms are served."""
    if not catalog.evaluation.arms:
        return ()
    return catalog.evaluation.conductors


def _recipient(catalog: Catalog, role: str, name: str) -> Recipient:
    provider = catalog.providers[catalog.workers[name].provider]
    addresses = tuple([endpoint.base_url for endpoint in provider.endpoints])
    if not addresses:
        addresses = (provider.base_url,)
    return Recipient(role, name, provider.name, addresses)


def widenings(old: Catalog, new: Catalog) -> Iterator[Widening]:
    """Yield one witness, with as few labels as possible, for each tier and recipient that is shown more.

    If nothing is yielded, it is proved that nobody is shown more. A tier that the old file does not have is compared
    with all of the old file's tiers. Raises `ConfigInvalid` for more than `MOST_LABELS` labels.
    """
    bits = Bits(labels_of(old, new))
    readers_by_old_tier = {name: _groups_of_readers(bits, old, tier) for name, tier in old.tiers.items()}
    all_old_readers = list(chain.from_iterable(readers_by_old_tier.values()))
    derives = _derives(old) or _derives(new)
    for name, tier in new.tiers.items():
        old_readers = readers_by_old_tier.get(name, all_old_readers)
        witnessed: set[Recipient] = set()
        for readers in _groups_of_readers(bits, new, tier):
            for widening in _find_widenings(bits, name, readers, old_readers, derives=derives):
                if widening.recipient not in witnessed:
                    witnessed.add(widening.recipient)
                    yield widening


class Bits:
    """Sets of labels and sources as whole numbers with a bit for each, so that many sets are compared quickly."""

    def __init__(self, labels: Sequence[str]) -> None:
        """`labels` are all labels, and the sources that rules name. Raises `ConfigInvalid` if they are too many."""
        if len(labels) > MOST_LABELS:
            count = f"the two files name {len(labels)} labels"
            raise ConfigInvalid([f"{count}, and the sets of at most {MOST_LABELS} can be enumerated; name fewer"])
        names = dict.fromkeys((*labels, *sorted(SOURCES)))
        self._bit = {name: 1 << place for place, name in enumerate(names)}
        self.enumerated = self.of(labels)
        self.labels = self.of(set(labels) - SOURCES)

    def of(self, names: Iterable[str]) -> int:
        """Return the set of those names that are known."""
        return sum(self._bit[name] for name in set(names) if name in self._bit)

    def names(self, bit_set: int) -> tuple[str, ...]:
        """Return the names of a set, labels first."""
        return tuple(name for name, bit in self._bit.items() if bit_set & bit)

    def reading(self, bit_set: int) -> Reading:
        """Return a set as what is read."""
        names = frozenset(self.names(bit_set))
        return Reading(names - SOURCES, names & SOURCES)


class Permissions(Struct, frozen=True):
    """A recipient's permissions, as sets of bits."""

    worker: Worker
    uncleared: int
    """The labels that it is not cleared for."""
    excluding_rules: tuple[int, ...]
    """The sets of labels and sources that rules keep from it."""
    inherited: int
    """The labels that its output has if what it read had them: all but those that it declassifies."""

    def may_read(self, bit_set: int) -> bool:
        """Return whether it may read words with these labels and sources."""
        if bit_set & self.uncleared:
            return False
        for rule in self.excluding_rules:
            if rule & bit_set == rule:
                return False
        return True


Readers = Mapping[Recipient, Permissions]


def _groups_of_readers(bits: Bits, catalog: Catalog, tier: Tier) -> list[Readers]:
    """Return the permissions of everybody in each of the tier's groups of recipients."""
    return [_readers(bits, group) for group in _groups_of_recipients(catalog, tier)]


def _readers(bits: Bits, group: Mapping[Recipient, Worker]) -> Readers:
    readers: dict[Recipient, Permissions] = {}
    for recipient, worker in group.items():
        uncleared = bits.labels & ~bits.of(worker.card.cleared)
        excluding_rules = tuple([bits.of(rule.labels) for rule in worker.excluding_rules])
        inherited = bits.labels & ~bits.of(worker.declassifies)
        readers[recipient] = Permissions(worker, uncleared, excluding_rules, inherited)
    return readers


def _permissions_of(recipient: Recipient, tiers: Sequence[Readers]) -> list[Permissions]:
    """Return the permissions that a recipient has in each of these tiers; none for a tier that does not have it."""
    return [readers[recipient] for readers in tiers if recipient in readers]


def _same(new: Readers, old: Readers) -> bool:
    """Return True if the same recipients have the same permissions."""
    return _sets_of_bits(new) == _sets_of_bits(old)


def _sets_of_bits(readers: Readers) -> Mapping[Recipient, tuple[int, tuple[int, ...], int]]:
    """Return the permissions without the workers, whose prices or strengths may differ."""
    sets: dict[Recipient, tuple[int, tuple[int, ...], int]] = {}
    for recipient, permissions in readers.items():
        sets[recipient] = (permissions.uncleared, permissions.excluding_rules, permissions.inherited)
    return sets


def _derives(catalog: Catalog) -> bool:
    """Return True if words that are made of others can be shown to more recipients than these."""
    if any(worker.declassifies for worker in catalog.workers.values()):
        return True
    return any(not rule.labels.isdisjoint(SOURCES) for rule in catalog.rules)


def _find_widenings(
    bits: Bits, tier: str, readers: Readers, old_readers: Sequence[Readers], *, derives: bool
) -> Iterator[Widening]:
    """Yield a witness for each of these recipients of a tier that is shown more than any of the old ones."""
    if any(_same(readers, earlier) for earlier in old_readers):
        return
    unwitnessed: list[Recipient] = []
    for recipient, permissions in readers.items():
        earlier_permissions = _permissions_of(recipient, old_readers)
        witness = _witness(bits, recipient.role, permissions, earlier_permissions)
        if witness is not None:
            reason = _reason(earlier_permissions, bits.reading(witness))
            yield Widening(tier, recipient, bits.names(witness), reason)
        elif recipient.role == "worker" and derives:
            unwitnessed.append(recipient)
    if unwitnessed:
        yield from _find_widenings_of_derived(bits, tier, unwitnessed, readers, old_readers)


def _witness(bits: Bits, role: str, permissions: Permissions, earlier_permissions: Sequence[Permissions]) -> int | None:
    """Return the smallest set of labels and sources that a recipient may read now and might not read before; None if
    there is none. Conductors and embedders always read the conversation."""
    conversation = bits.of({CALLER}) if role != "worker" else 0
    for bit_set in _subsets(bits.enumerated & ~permissions.uncleared):
        reading = bit_set | conversation
        if permissions.may_read(reading) and not any(earlier.may_read(reading) for earlier in earlier_permissions):
            return bit_set
    return None


def _find_widenings_of_derived(
    bits: Bits, tier: str, recipients: Sequence[Recipient], readers: Readers, old_readers: Sequence[Readers]
) -> Iterator[Widening]:
    """Yield a witness for each of these recipients that is shown more of what others make of a conversation."""
    remaining = list(recipients)
    for labels in _subsets(bits.labels):
        derivations = _derivations(bits, readers, labels)
        old_derivations = [_derivations(bits, earlier_readers, labels) for earlier_readers in old_readers]
        for recipient in tuple(remaining):
            readable = _first_readable(derivations, readers, recipient)
            pairs = zip(old_derivations, old_readers, strict=True)
            readable_before = [_first_readable(texts, earlier, recipient) for texts, earlier in pairs]
            if readable is None or any(bit_set is not None for bit_set in readable_before):
                continue
            remaining.remove(recipient)
            earlier_permissions = _permissions_of(recipient, old_readers)
            reason = _reason(earlier_permissions, bits.reading(labels | bits.of({CALLER})))
            through = tuple([author.worker.name for author in derivations[readable]])
            yield Widening(tier, recipient, bits.names(labels), reason or "nothing of it was shown to it", through)


def _first_readable(bit_sets: Iterable[int], readers: Readers, recipient: Recipient) -> int | None:
    """Return the first of these sets that a recipient may read; None if there is none, or if it is none of these
    readers."""
    if recipient in readers:
        return next((bit_set for bit_set in bit_sets if readers[recipient].may_read(bit_set)), None)
    return None


def _derivations(bits: Bits, readers: Readers, labels: int) -> Mapping[int, tuple[Permissions, ...]]:
    """Return all that can be made of a conversation with these labels: the set that each text carries, with those who
    made it, in their order. The conversation itself is among them, made by nobody."""
    conversation = labels | bits.of({CALLER})
    step, conductor = bits.of({STEP}), bits.of({CONDUCTOR})
    authors: dict[int, tuple[Permissions, ...]] = {conversation: ()}
    for recipient, reader in readers.items():
        if recipient.role == "conductor" and reader.may_read(conversation):
            authors.setdefault(conversation & reader.inherited | conductor, (reader,))
    workers = [reader for recipient, reader in readers.items() if recipient.role == "worker"]
    queue = list(authors)
    for bit_set in queue:
        for worker in workers:
            output = bit_set & worker.inherited | step
            if output not in authors and worker.may_read(bit_set):
                authors[output] = (*authors[bit_set], worker)
                queue.append(output)
    return authors


def _subsets(bit_set: int) -> Iterator[int]:
    """Yield all subsets, small ones first."""
    bits = [1 << place for place in range(bit_set.bit_length()) if bit_set >> place & 1]
    for size in range(len(bits) + 1):
        yield from map(sum, combinations(bits, size))


def _reason(earlier_permissions: Sequence[Permissions], reading: Reading) -> str:
    """Return the reason why the old file did not show these words to a recipient."""
    if not earlier_permissions:
        return "it was not a recipient of this tier"
    return exclusion(earlier_permissions[0].worker, reading)
