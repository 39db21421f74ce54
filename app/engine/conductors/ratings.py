"""Learning from ratings: what selectors believe is kept in the database, and every process follows it there.

Each process looks every second. A process that finds ratings that were not learned yet works them in and writes the
posterior under the next number; of two who try it at the same time one succeeds, and the other reads what that one has
written. So all processes choose by the same posterior, a restart loses nothing, and the number and hash that a decision
names stand for one posterior only. Ratings are taken in the order of their times; one that comes `LATE_SECONDS` after
another that was learned is still taken, a later one is not.

A tier has one row for the shared posterior and for what was read (`LearningState`), and one for the own part of each
tenant (`rating/tenancy.py`), which is written together with it. Of the tenants with the latest ratings, `MOST_TENANTS`
are held in memory; the requests of others are decided by the shared posterior and by its peers until they rate again.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app.core.plan.templates import arm_of_workers
from app.core.pool.catalog import SelectorSpec, Tier, Worker
from app.core.rating import evidence
from app.core.rating.calibration import Trial, of_worker
from app.core.rating.evidence import PolicyState, RatedRun
from app.core.rating.features import features
from app.core.rating.feedback import Feedback
from app.core.rating.posterior import (
    ANSWERING,
    Posterior,
    Rating,
    digest,
    fade_posterior,
    from_json,
    learned_part,
    update_posterior,
)
from app.core.rating.published_posterior import LEAST_RATINGS, Beliefs, PublishedPosterior, policy
from app.core.rating.tenancy import fade_own_part, join_posteriors, update_own_part
from app.engine.context import EngineContext
from app.engine.periodic import look_repeatedly
from app.errors import StoreUnavailable
from app.store.protocol import Learning

LOOK_SECONDS = 1.0
"""Seconds between two looks for ratings."""
LATE_SECONDS = 5.0
"""Seconds for which ratings may arrive out of order: clocks differ, and commits take their time."""
PAGE_RATINGS = 100
RATINGS_AT_ONCE = 25
"""Ratings that are learned between two looks at other work."""
MOST_TENANTS = 64
"""The tenants of a tier whose own beliefs a process holds, each of up to a megabyte."""
DAY_SECONDS = 86_400.0
CHANGED_WORKER = "A worker's ratings do not fit what was learned of it before; what was learned since replaces it."
EXCHANGED_WORKERS = (
    "Two workers seem to have exchanged their models; each is believed to be what was learned of the other one."
)
FADE_SECONDS = DAY_SECONDS
"""Seconds after which a posterior is written again although nothing was rated, so that it fades."""


class LearningState(Struct, frozen=True):
    """The shared posterior with what it takes to go on learning: up to which time ratings were seen, and which of the
    last `LATE_SECONDS` seconds."""

    posterior: Posterior = Posterior()
    mark: float = 0.0
    tried: float = 0.0
    """Up to when trials of a calibration (`rating/calibration.py`) were worked in."""
    recent: frozenset[tuple[float, str]] = frozenset()
    shared: int = 0
    """The number under which the shared posterior was changed last."""
    tenants: Mapping[str, tuple[int, int]] = {}
    """For the tenants with the latest ratings: the number of the row with its own part, and its ratings."""
    day: int = 0
    counted: Mapping[str, int] = {}
    """The ratings of each API key on that day since 1970, where only so many count."""

    def to_json(self) -> bytes:
        """The state as it is stored."""
        kept = {
            "mark": self.mark,
            "tried": self.tried,
            "recent": sorted(self.recent),
            "shared": self.shared,
            "tenants": dict(sorted(self.tenants.items())),
            "day": self.day,
            "counted": dict(sorted(self.counted.items())),
        }
        return orjson.dumps(kept | {"posterior": self.posterior.to_json().decode()})


def state_from_json(body: bytes) -> LearningState:
    """Return the state that `LearningState.to_json` has written."""
    value: dict[str, Any] = orjson.loads(body)
    return LearningState(
        posterior=from_json(value["posterior"].encode()),
        mark=value["mark"],
        tried=value["tried"],
        recent=frozenset((at, name) for at, name in value["recent"]),
        shared=value["shared"],
        tenants={tenant: (number, ratings) for tenant, (number, ratings) in value["tenants"].items()},
        day=value["day"],
        counted=value["counted"],
    )


def row_of(tier: str, tenant: str) -> str:
    """Return the name of the row that holds a tenant's own part."""
    return f"{policy(tier)}/{tenant}"


async def posterior_of(store: Learning, tier: str, tenant: str) -> Posterior:
    """The posterior by which a tenant's requests are decided, as it stands in the database."""
    shared, own = (
        await store.find_learned_state(policy(tier), 0),
        await store.find_learned_state(row_of(tier, tenant), 0),
    )
    posterior = Posterior()
    if shared is not None:
        posterior = state_from_json(shared.body).posterior
    if own is None:
        return posterior
    return join_posteriors(posterior, from_json(own.body))


class SelectorBeliefs:
    """The posteriors by which the selectors of this process choose; only `RatingReader` changes them."""

    def __init__(self) -> None:
        self._shared: dict[str, PublishedPosterior] = {}
        self._own: dict[str, Mapping[str, Beliefs]] = {}
        self._peers: dict[str, tuple[PublishedPosterior, ...]] = {}

    def of(self, tier: str, tenant: str) -> Beliefs:
        """The beliefs by which a tenant's requests are decided, as far as they are known here."""
        own = self._own.get(tier, {}).get(tenant)
        if own is not None:
            return own
        return Beliefs(self._shared.get(tier, PublishedPosterior()), 0, self._peers.get(tier, ()))

    def put(self, tier: str, shared: PublishedPosterior, own: Mapping[str, tuple[PublishedPosterior, int]]) -> None:
        """Set the posteriors of a tier: the shared one, and each tenant's with the number of its ratings."""
        experienced = {}
        for tenant, (published, ratings) in own.items():
            if ratings >= LEAST_RATINGS:
                experienced[tenant] = published
        beliefs = {}
        for tenant, (published, ratings) in own.items():
            peers = tuple([theirs for name, theirs in experienced.items() if name != tenant])
            beliefs[tenant] = Beliefs(published, ratings, peers)
        self._shared[tier] = shared
        self._own[tier] = beliefs
        self._peers[tier] = tuple(experienced.values())


class TenantPart(Struct, frozen=True):
    """The own part of a tenant, with the number of its row and the posterior that it makes of the shared one."""

    number: int
    part: Posterior
    published: PublishedPosterior


class LoadedRows(Struct, frozen=True):
    """The rows of a tier as a process has read them: the learning state, its number, and tenants' own parts."""

    number: int = 0
    state: LearningState = LearningState()
    owns: Mapping[str, TenantPart] = {}


class RatingReader:
    """One process's part in learning."""

    def __init__(self, context: EngineContext, beliefs: SelectorBeliefs) -> None:
        self._context = context
        self._beliefs = beliefs
        self._loaded: dict[str, LoadedRows] = {}
        self._begun: dict[str, list[Worker]] = {}
        """The workers of each tier with which all trials were looked through."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Look until `stopping` is set."""
        await look_repeatedly(self.look, stopping, LOOK_SECONDS, self._context.telemetry, "Learning from ratings")

    async def look(self) -> None:
        """Learn for every tier with a selector. A failure with one tier is logged and tried again."""
        tiers = selectors(list(self._context.catalog().tiers.values()))
        for name in self._loaded.keys() - {tier.name for tier, _ in tiers}:
            del self._loaded[name]
            self._context.telemetry.unwatch("baton_selector_ratings", name)
        for tier, spec in tiers:
            try:
                await self.learn(tier, spec)
            except StoreUnavailable:
                raise
            except Exception as bug:  # a rating that cannot be read must not keep the other tiers from learning
                self._context.telemetry.log(
                    logging.ERROR,
                    "Ratings could not be learned because of a bug; they are tried again.",
                    bug,
                    tier=tier.name,
                )

    async def learn(self, tier: Tier, spec: SelectorSpec) -> None:
        """Follow the tier's posteriors, and work in what was rated since."""
        while True:
            loaded = await self._follow(tier.name)
            state = loaded.state
            ratings = await self._new_ratings(state)
            must_fade = bool(state.posterior.at) and self._context.now() - state.posterior.at >= FADE_SECONDS
            trials = await self._new_trials(tier, state)
            if not ratings and not trials and not must_fade:
                return
            number = loaded.number + 1
            shared = _learn_trials(state, spec, self._workers(tier), trials)
            if trials or must_fade:
                shared = replace(shared, shared=number)
            after, parts = await self._learn_from(tier, spec, number, shared, ratings)
            if must_fade:
                parts = {**_faded_parts(loaded, spec, self._context.now()), **parts}
                after = _with_tenants(after, number, parts)
            rows = {row_of(tier.name, tenant): part.to_json() for tenant, part in parts.items()}
            next_row = PolicyState(number, after.to_json())
            if await self._context.store.learn(policy(tier.name), next_row, self._context.now(), rows):
                self._log_changes(tier.name, loaded, after, parts)
                self._publish(tier.name, number, after, parts)

    async def _follow(self, tier: str) -> LoadedRows:
        """Follow what any process has learned for a tier."""
        loaded = self._loaded.get(tier, LoadedRows())
        stored = await self._context.store.find_learned_state(policy(tier), loaded.number)
        if stored is None:
            return loaded
        state = state_from_json(stored.body)
        parts = {}
        for tenant, (number, _) in state.tenants.items():
            own = loaded.owns.get(tenant)
            if own is None or own.number < number:
                parts[tenant] = await self._part(tier, tenant)
        self._publish(tier, stored.number, state, parts)
        return self._loaded[tier]

    async def _part(self, tier: str, tenant: str) -> Posterior:
        """The own part of a tenant as it stands in the database."""
        stored = await self._context.store.find_learned_state(row_of(tier, tenant), 0)
        if stored is not None:
            return from_json(stored.body)
        return Posterior()

    def _publish(self, tier: str, number: int, state: LearningState, parts: Mapping[str, Posterior]) -> None:
        """Choose by these posteriors from now on; `parts` are the own parts that are new."""
        before = self._loaded.get(tier, LoadedRows())
        body = state.posterior.to_json()
        owns = {}
        for tenant, (row, _) in state.tenants.items():
            own = before.owns.get(tenant)
            part = Posterior()
            if tenant in parts:
                part = parts[tenant]
            elif own is not None:
                part = own.part
            if own is None or tenant in parts or before.state.shared != state.shared:
                whole = join_posteriors(state.posterior, part)
                own = TenantPart(row, part, PublishedPosterior(whole, row, digest(body + part.to_json())))
            owns[tenant] = own
        self._loaded[tier] = LoadedRows(number, state, owns)
        beliefs = {tenant: (own.published, state.tenants[tenant][1]) for tenant, own in owns.items()}
        self._beliefs.put(tier, PublishedPosterior(state.posterior, state.shared, digest(body)), beliefs)
        total = state.posterior.ratings + sum([ratings for _, ratings in state.tenants.values()])
        self._context.telemetry.gauge("baton_selector_ratings", total, tier)

    def _log_changes(self, tier: str, loaded: LoadedRows, after: LearningState, parts: Mapping[str, Posterior]) -> None:
        """Warn of changes of workers that were found in the shared posterior, and in the own parts of tenants."""
        finders: list[tuple[Posterior, Posterior, dict[str, str]]] = [(loaded.state.posterior, after.posterior, {})]
        for tenant, part in parts.items():
            if tenant in loaded.owns:
                finders.append((loaded.owns[tenant].part, part, {"tenant": tenant}))
        for before, now, fields in finders:
            if now.changes > before.changes:
                exchanged = now.exchanges.exchanged_since(before.exchanges)
                message = CHANGED_WORKER
                if exchanged:
                    message, fields["worker"] = EXCHANGED_WORKERS, ", ".join(exchanged)
                self._context.telemetry.log(logging.WARNING, message, tier=tier, **fields)

    async def _new_ratings(self, state: LearningState) -> Sequence[Feedback]:
        """The next ratings that were not seen yet; none if there are none."""
        last = (state.mark - LATE_SECONDS, "")
        while page := await self._context.store.feedback_after(last, PAGE_RATINGS):
            new = [rating for rating in page if (rating.at, rating.id) not in state.recent]
            if new:
                return new
            last = (page[-1].at, page[-1].id)
        return ()

    async def _learn_from(
        self, tier: Tier, spec: SelectorSpec, number: int, state: LearningState, new_ratings: Sequence[Feedback]
    ) -> tuple[LearningState, Mapping[str, Posterior]]:
        """The state with these ratings worked in, and the own parts of the tenants that gave them."""
        state, rated = _within_daily_limit(state, spec, await self._find_rated_runs(tier, new_ratings))
        workers, raters = self._workers(tier), dict(spec.raters)
        posterior = state.posterior
        ratings: dict[str, list[Rating]] = {}
        for rated_run in rated:
            rating = evidence.build_rating(rated_run, raters)
            if rating is None:
                continue
            if rated_run.rating.tenant in spec.trusted:
                posterior = update_posterior(posterior, spec, workers, rating)
                state = replace(state, shared=number)
            else:
                ratings.setdefault(rated_run.rating.tenant, []).append(rating)
        parts = {}
        for tenant, own in ratings.items():
            part = await self._own_part(tier.name, tenant)
            for first in range(0, len(own), RATINGS_AT_ONCE):
                part = update_own_part(posterior, part, spec, workers, own[first : first + RATINGS_AT_ONCE])
                await asyncio.sleep(0)  # a page takes some ten milliseconds, and callers wait for none of it
            parts[tenant] = part
        mark = max([state.mark, *(given.at for given in new_ratings)])
        recent = {(at, name) for at, name in state.recent if at >= mark - LATE_SECONDS}
        recent.update([(given.at, given.id) for given in new_ratings])
        if state.shared == number or not posterior.at:
            posterior = fade_posterior(posterior, spec.decay, self._context.now())
        after = replace(state, posterior=posterior, mark=mark, recent=frozenset(recent))
        return _with_tenants(after, number, parts), parts

    async def _find_rated_runs(self, tier: Tier, ratings: Sequence[Feedback]) -> list[RatedRun]:
        """The runs of the tier that these ratings are about."""
        if not ratings:
            return []
        rated = await self._context.store.find_rated_runs(ratings, evidence.ARM_KINDS, evidence.find_features_ref)
        return [rated_run for rated_run in rated if _learning_tier(rated_run) == tier.name]

    async def _own_part(self, tier: str, tenant: str) -> Posterior:
        """The own part of a tenant, whether it is held here or not."""
        own = self._loaded.get(tier, LoadedRows()).owns.get(tenant)
        if own is not None:
            return own.part
        return await self._part(tier, tenant)

    def _workers(self, tier: Tier) -> list[Worker]:
        workers = self._context.catalog().workers
        return [workers[name] for name in tier.pool]

    async def _new_trials(self, tier: Tier, state: LearningState) -> list[Trial]:
        """The trials of the tier's workers that were not worked in yet, in the order of their times: all that there are
        of a worker of which nothing is known, since it may have joined the tier after they were made."""
        workers = self._workers(tier)
        news = state.tried if self._begun.get(tier.name) == workers else None
        trials = await self._context.store.trials(news)
        models = {worker.name: worker.model for worker in workers}
        new_trials: list[Trial] = []
        for worker in workers:
            is_known = learned_part(state.posterior, f"{ANSWERING}{worker.name}", models) in state.posterior.weights
            since = state.tried if is_known else 0.0
            new_trials += [trial for trial in of_worker(trials, worker) if trial.at > since]
        if not new_trials:
            self._begun[tier.name] = workers
        return sorted(new_trials, key=lambda trial: (trial.at, trial.worker, trial.task))


def _learn_trials(
    state: LearningState, spec: SelectorSpec, workers: Sequence[Worker], trials: Sequence[Trial]
) -> LearningState:
    """The state with trials worked in: each is a rating of the worker alone at that question."""
    posterior = state.posterior
    for trial in trials:
        plan = arm_of_workers("answer", [trial.worker])
        rating = Rating(plan, features(trial.question), trial.score, trial.usd, trial.at)
        posterior = update_posterior(posterior, spec, workers, rating)
    tried = max([state.tried, *(trial.at for trial in trials)])
    return replace(state, posterior=posterior, tried=tried)


def _with_tenants(state: LearningState, number: int, parts: Mapping[str, Posterior]) -> LearningState:
    """The state with the tenants whose own parts are written under this number; those with the latest ratings stay."""
    tenants = dict(state.tenants)
    for tenant, part in parts.items():
        tenants[tenant] = (number, part.ratings)
    latest = sorted(tenants, key=lambda tenant: tenants[tenant], reverse=True)[:MOST_TENANTS]
    return replace(state, tenants={tenant: tenants[tenant] for tenant in latest})


def _faded_parts(loaded: LoadedRows, spec: SelectorSpec, now: float) -> Mapping[str, Posterior]:
    """The own parts of the tenants that are held, faded until now."""
    return {tenant: fade_own_part(own.part, spec.decay, now) for tenant, own in loaded.owns.items()}


def _within_daily_limit(
    state: LearningState, spec: SelectorSpec, rated: Sequence[RatedRun]
) -> tuple[LearningState, list[RatedRun]]:
    """The ratings that are not beyond the most of their API key on one day, and the state in which they are counted."""
    if not spec.daily:
        return state, list(rated)
    day, counted = state.day, dict(state.counted)
    within_limit = []
    for rated_run in rated:
        key = rated_run.rating.key
        day_of_rating = int(rated_run.rating.at // DAY_SECONDS)
        if day_of_rating > day:
            day, counted = day_of_rating, {}
        counted[key] = counted.get(key, 0) + 1
        if not key or counted[key] <= spec.daily:
            within_limit.append(rated_run)
    return replace(state, day=day, counted=counted), within_limit


def _learning_tier(rated: RatedRun) -> str:
    """Return the tier whose selector has decided the run, which may be another one that serves the run's own."""
    decided = evidence.decision(rated.events)
    if decided is None:
        return rated.tier
    return str(decided["policy"]).partition("/")[2]


def selectors(tiers: Sequence[Tier]) -> list[tuple[Tier, SelectorSpec]]:
    """Return the tiers that learn, each with the settings of its selector."""
    return [(tier, tier.conductor.selector) for tier in tiers if tier.conductor.selector is not None]
