"""Learning from ratings: what selectors believe is kept in the database, and every process follows it there.

Each process looks every `EVERY` seconds. A process that finds ratings that were not learned yet works them in and
writes the posterior under the next number; of two who try it at the same time one succeeds, and the other reads what
that one has written. So all processes choose by the same posterior, a restart loses nothing, and the number and hash
that a decision names stand for one posterior only. Ratings are taken in the order of their times; one that comes `LATE`
after another that was learned is still taken, a later one is not.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import Any

import orjson

from app.core.plan.templates import manned
from app.core.pool.catalog import SelectorSpec, Tier, Worker
from app.core.rating import evidence
from app.core.rating.calibration import Trial, of_worker
from app.core.rating.evidence import Learned, Rated
from app.core.rating.features import features
from app.core.rating.feedback import Feedback
from app.core.rating.posterior import Posterior, Rating, digest, faded, from_json, learned
from app.core.rating.published_posterior import Standing, policy
from app.core.records import record
from app.engine.context import EngineContext
from app.errors import StoreUnavailable

EVERY = 1.0
"""Seconds between two looks for ratings."""
LATE = 5.0
"""Seconds for which ratings may arrive out of order: clocks differ, and commits take their time."""
PAGE = 100
FADES = 86_400.0
"""Seconds after which a posterior is written again although nothing was rated, so that it fades."""


@record(frozen=True, slots=True)
class Notes:
    """A posterior with what it takes to go on learning: up to which time ratings were seen, and which of the last
    `LATE` seconds."""

    posterior: Posterior = field(default_factory=Posterior)
    mark: float = 0.0
    tried: float = 0.0
    """Up to when trials of a calibration (`rating/calibration.py`) were worked in."""
    recent: frozenset[tuple[float, str]] = field(default_factory=frozenset)

    def to_json(self) -> bytes:
        """The notes as they are stored."""
        kept = {"mark": self.mark, "tried": self.tried, "recent": sorted(self.recent)}
        return orjson.dumps(kept | {"posterior": self.posterior.to_json().decode()})


def read(body: bytes) -> Notes:
    """The inverse of `Notes.to_json`."""
    value: dict[str, Any] = orjson.loads(body)
    recent = frozenset((at, name) for at, name in value["recent"])
    return Notes(from_json(value["posterior"].encode()), value["mark"], value["tried"], recent)


class Standings:
    """The posteriors by which the selectors of this process choose; only `RatingReader` changes them."""

    def __init__(self) -> None:
        self._standing: dict[str, Standing] = {}

    def of(self, tier: str) -> Standing:
        """The posterior of a tier, as far as it is known here."""
        return self._standing.get(tier, Standing())

    def put(self, tier: str, standing: Standing) -> None:
        """Set the posterior of a tier."""
        self._standing[tier] = standing


class RatingReader:
    """One process's part in learning."""

    def __init__(self, context: EngineContext, standings: Standings) -> None:
        self._context = context
        self._standings = standings
        self._notes: dict[str, Notes] = {}

    async def run(self, stopping: asyncio.Event) -> None:
        """Look until `stopping` is set. A failure with one tier is logged and tried again."""
        while not stopping.is_set():
            for tier, spec in selectors(list(self._context.catalog().tiers.values())):
                try:
                    await self.learn(tier, spec)
                except StoreUnavailable:
                    break
                except Exception as bug:  # a rating that cannot be read must not stop the service
                    self._context.telemetry.log(
                        logging.ERROR,
                        "Ratings could not be learned because of a bug; they are tried again.",
                        tier=tier.name,
                    )
                    logging.getLogger("baton").error("ratings", exc_info=bug)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await stopping.wait()

    async def learn(self, tier: Tier, spec: SelectorSpec) -> None:
        """Follow the tier's posterior, and work in what was rated since."""
        while True:
            notes = await self._follow(tier.name)
            number = self._standings.of(tier.name).number
            fresh = await self._fresh(notes)
            stale = bool(notes.posterior.at) and self._context.now() - notes.posterior.at >= FADES
            trials = self._trials(tier, notes, await self._context.store.trials(notes.tried))
            if not fresh and not trials and not stale:
                return
            after = await self._worked_in(tier, spec, _calibrated(notes, spec, self._workers(tier), trials), fresh)
            following = Learned(number + 1, after.to_json())
            if await self._context.store.learn(policy(tier.name), following, self._context.now()):
                self._stand(tier.name, after, number + 1)

    async def _follow(self, tier: str) -> Notes:
        """Follow what any process has learned for a tier."""
        found = await self._context.store.learned(policy(tier), self._standings.of(tier).number)
        if found is not None:
            self._stand(tier, read(found.body), found.number)
        return self._notes.get(tier, Notes())

    def _stand(self, tier: str, notes: Notes, number: int) -> None:
        self._notes[tier] = notes
        standing = Standing(notes.posterior, number, digest(notes.posterior.to_json()))
        self._standings.put(tier, standing)
        self._context.telemetry.gauge("baton_selector_ratings", notes.posterior.ratings, tier)

    async def _fresh(self, notes: Notes) -> Sequence[Feedback]:
        """The next ratings that were not seen yet; none if there are none."""
        last = (notes.mark - LATE, "")
        while page := await self._context.store.feedback_after(last, PAGE):
            if fresh := [one for one in page if (one.at, one.id) not in notes.recent]:
                return fresh
            last = (page[-1].at, page[-1].id)
        return ()

    async def _worked_in(self, tier: Tier, spec: SelectorSpec, notes: Notes, fresh: Sequence[Feedback]) -> Notes:
        rated = await self._context.store.rated(fresh, evidence.TOLD, evidence.looked_at) if fresh else ()
        workers = self._workers(tier)
        posterior = notes.posterior
        for one in rated:
            if one.tier == tier.name:
                posterior = _after(posterior, spec, workers, one)
            await asyncio.sleep(0)  # a page takes some ten milliseconds, and callers wait for none of it
        mark = max([notes.mark, *(one.at for one in fresh)])
        recent = {one for one in notes.recent if one[0] >= mark - LATE} | {(one.at, one.id) for one in fresh}
        return Notes(faded(posterior, spec.decay, self._context.now()), mark, notes.tried, frozenset(recent))

    def _workers(self, tier: Tier) -> list[Worker]:
        known = self._context.catalog().workers
        return [known[name] for name in tier.pool]

    def _trials(self, tier: Tier, notes: Notes, trials: Sequence[Trial]) -> list[Trial]:
        """The trials of the tier's workers that were not worked in yet, in the order of their times."""
        own = [one for worker in self._workers(tier) for one in of_worker(trials, worker) if one.at > notes.tried]
        return sorted(own, key=lambda one: (one.at, one.worker, one.task))


def _calibrated(notes: Notes, spec: SelectorSpec, workers: Sequence[Worker], trials: Sequence[Trial]) -> Notes:
    """The notes with trials worked in: each is a rating of the worker alone at that question."""
    posterior = notes.posterior
    for one in trials:
        trial = Rating(manned("answer", [one.worker]), features(one.question), one.score, one.usd, one.at)
        posterior = learned(posterior, spec, workers, trial)
    return replace(notes, posterior=posterior, tried=max([notes.tried, *(one.at for one in trials)]))


def _after(posterior: Posterior, spec: SelectorSpec, workers: Sequence[Worker], rated: Rated) -> Posterior:
    """The posterior after one rated run."""
    rating = evidence.rating(rated)
    return posterior if rating is None else learned(posterior, spec, workers, rating)


def selectors(tiers: Sequence[Tier]) -> list[tuple[Tier, SelectorSpec]]:
    """The tiers that learn."""
    return [(tier, spec) for tier in tiers if (spec := tier.conductor.selector) is not None]
