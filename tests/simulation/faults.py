"""The faults that may happen, by name, and how often each does in a given world.

Every site has a usual rate. A seed does not use them all: most worlds leave half of them out, some have a few very
often ("swarm testing"), and each seed features two sites in turn, so that the rare ones are met as surely as the
frequent ones. One seed in eight is calm: nothing goes wrong, and then nothing may be lost or even degraded.
"""

import random
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

import app

POINTS = (
    "store.read",
    "store.write",
    "store.committed",
    "queue.ring",
    "queue.rung",
    "queue.take",
    "queue.taken",
    "queue.keep",
    "queue.done",
    "queue.tell",
    "worker.connect",
    "worker.received",
    "worker.piece",
    "worker.answered",
    "webhook.sent",
    "webhook.received",
)
"""Awaits at the seams where a whole process may be struck."""

USUAL: Mapping[str, float] = {
    "store.read.slow": 0.02,
    "store.read.down": 0.01,
    "store.read.lost": 0.01,
    "store.write.slow": 0.02,
    "store.write.down": 0.01,
    "store.write.timeout": 0.005,
    "store.write.lost": 0.01,
    "store.write.contended": 0.03,
    "store.write.refused": 0.003,
    "store.answer.slow": 0.02,
    "store.commit.unanswered_written": 0.01,
    "store.commit.unanswered_not_written": 0.01,
    "queue.ring.lost": 0.10,
    "queue.ring.thrice": 0.10,
    "queue.ring.late": 0.10,
    "queue.ring.fails": 0.03,
    "queue.ring.fails_but_rings": 0.03,
    "queue.take.fails": 0.01,
    "queue.take.reply_lost": 0.05,
    "queue.take.given_twice": 0.05,
    "queue.keep.fails": 0.05,
    "queue.done.fails": 0.05,
    "queue.tell.lost": 0.05,
    "queue.tell.late": 0.08,
    "queue.tell.twice": 0.05,
    "queue.tell.fails": 0.02,
    "worker.unavailable": 0.05,
    "worker.rate_limited": 0.05,
    "worker.rate_limited_for_long": 0.02,
    "worker.refuses": 0.02,
    "worker.misconfigured": 0.02,
    "worker.malformed": 0.03,
    "worker.truncated_early": 0.03,
    "worker.truncated_late": 0.04,
    "worker.hangs_at_first": 0.01,
    "worker.hangs_midway": 0.01,
    "worker.slow": 0.05,
    "worker.empty": 0.03,
    "worker.declines": 0.02,
    "worker.tells_no_usage": 0.05,
    "worker.writes_a_plan": 0.05,
    "worker.adapter_breaks": 0.005,
    "worker.calls_badly": 0.08,
    "conductor.unavailable": 0.05,
    "conductor.truncated": 0.05,
    "conductor.hangs": 0.01,
    "conductor.slow": 0.05,
    "conductor.garbage": 0.05,
    "conductor.unknown_worker": 0.05,
    "conductor.sees_ahead": 0.05,
    "conductor.too_many_steps": 0.05,
    "conductor.empty_plan": 0.05,
    "conductor.always_wrong": 0.05,
    "caller.cancels": 0.08,
    "caller.leaves": 0.06,
    "caller.repeats": 0.10,
    "caller.reads_slowly": 0.08,
    "caller.brings_little_money": 0.06,
    "caller.abandons": 0.10,
    "caller.wavers": 0.10,
    "caller.erases": 0.08,
    "receiver.refuses": 0.40,
    "receiver.asks_to_wait": 0.20,
    "receiver.hangs": 0.15,
    "receiver.reply_lost": 0.25,
    "process.clock_starts_wrong": 0.10,
    "process.clock_stands_still": 0.30,
    # The following are tried about twice a second.
    "store.outage": 0.02,
    "queue.outage": 0.02,
    "queue.flushed": 0.03,
    "queue.deaf": 0.03,
    "queue.forged_tickets": 0.08,
    "process.killed": 0.03,
    "process.frozen": 0.03,
    "process.drained": 0.04,
    **{f"crash at {point}": 0.1 if point.startswith("webhook") else 0.004 for point in POINTS},
    **{f"freeze at {point}": 0.1 if point.startswith("webhook") else 0.004 for point in POINTS},
}
OF_PERSONS: Mapping[str, float] = {
    "operator.reloads": 0.08,  # tried about twice a second
    "caller.needs_approval": 0.50,
    "caller.withdraws": 0.10,
    "approver.is_silent": 0.15,
    "approver.is_late": 0.15,
    "approver.refuses": 0.25,
    "approver.repeats": 0.15,
    "approver.wavers": 0.15,
    "approver.mistakes_the_plan": 0.20,
    "approver.names_others": 0.20,
    "approver.allows_little": 0.15,
}
"""What operators do, and approvers, and callers who need these. It has chance of its own, `Faults.persons`: a world in
which nothing of this happens is the same with it and without it."""
SITES = (*USUAL, *OF_PERSONS)
HIGHEST = 0.35
PRODUCT = f"{Path(app.__file__).parent}/"
BENEATH = (f"{PRODUCT}store/", f"{PRODUCT}stepqueue/")


class FaultRates(Struct, frozen=True):
    """The faults of a world: `only` these sites at these rates, or, if None, what the seed says."""

    only: Mapping[str, float] | None = None

    def of_seed(self, seed: int) -> Mapping[str, float]:
        """Site to rate; a site that is left out does not happen."""
        if self.only is not None:
            return self.only
        if seed % 8 == 0:
            return {}
        chance = random.Random(f"weather {seed}")
        rates = {site: usual * chance.choice((0.5, 1.0, 3.0)) for site, usual in USUAL.items() if chance.random() < 0.5}
        sites = tuple(USUAL)
        for featured in (sites[seed % len(sites)], sites[(7 * seed + 3) % len(sites)]):
            rates[featured] = max(8 * USUAL[featured], 0.15)
        persons = random.Random(f"persons {seed}")
        for site, usual in OF_PERSONS.items():
            if persons.random() < 0.5:
                rates[site] = usual * persons.choice((0.5, 1.0, 3.0))
        return {site: min(rate, HIGHEST) for site, rate in rates.items()}


AS_SEEDED = FaultRates()


@dataclass(slots=True)
class Faults:
    """The dice of one world. Nothing happens unless `on`."""

    rates: Mapping[str, float]
    chance: random.Random
    persons: random.Random
    """The chance of `OF_PERSONS`."""
    on: bool = True
    hits: Counter[str] = field(default_factory=Counter)
    places: set[tuple[str, str]] = field(default_factory=set)
    """Which fault struck which await of the product."""

    def hit(self, site: str) -> bool:
        """Return whether it happens now."""
        rate = self.rates.get(site, 0.0)
        chance = self.persons if site in OF_PERSONS else self.chance
        if not self.on or not rate or chance.random() >= rate:
            return False
        self.hits[site] += 1
        self.places.add((site, _place()))
        return True


def _place() -> str:
    """Return the await of the product that is struck, above its store and its queue where there is one, and who waits
    for that."""
    frame, name_of_place, above = sys._getframe(2), "", False
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PRODUCT):
            here = f"{name.removeprefix(PRODUCT)}:{frame.f_lineno}"
            if above:
                return f"{name_of_place} < {here}"
            name_of_place, above = here, not name.startswith(BENEATH)
        frame = frame.f_back
    return name_of_place
