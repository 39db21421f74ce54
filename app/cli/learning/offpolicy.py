"""`baton offpolicy` estimates what other policies would have earned, from rated runs whose plan was drawn at random.

Each decision is weighted by the probability with which it was drawn, which was journaled before it took effect. A
policy gets no verdict if too few decisions support it (`app/lab/offpolicy.py`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import orjson
from rich.table import Table

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.core.message.chat import task_from_json
from app.core.pool.catalog import Tier
from app.core.rating.features import Features, features, from_json
from app.core.rating.features import asked as words
from app.core.run.events import RunAdmitted, facts
from app.engine.conductors.ratings import posterior_of
from app.errors import ConfigInvalid
from app.lab.logged_decisions import (
    ALWAYS,
    CURRENT,
    GREEDY,
    UNIFORM,
    Beliefs,
    LoggedDecision,
    choice,
    conversation,
    hashed_features,
    logged_decision,
    worth,
)
from app.lab.offpolicy import SELECTION, Estimate, Log, Logged, Policy, Report, mean
from app.process.config import Loaded, configure
from app.store.protocol import RunQuery, RunRow, Store

PAGE = 200
FREQUENT = 6
"""The number of arms that are judged by default: those that were taken most often."""

Group = tuple[str, str, str]
"""Tier, layer and shape, whose decisions are judged together."""


@dataclass(frozen=True, slots=True)
class RewardedDecision:
    """A decision and its reward. `seen` is None if the request was erased; then only the arms are known."""

    decided: LoggedDecision
    seen: Features | None
    reward: float
    beliefs: Beliefs | None = None
    """The beliefs of the tier's selector for the tenant of the run; None where the tier has no selector."""
    conversation: str = ""
    """The name of the conversation; empty if it was erased."""
    seen_after: Features | None = None
    """The features by which the selector decided about the answer in a second round; None if there was none."""

    @property
    def logged(self) -> Logged:
        """Return the row in the form that the estimators read."""
        first = self._of(self.decided, self.seen)
        if self.decided.further is None:
            return first
        return replace(first, further=self._of(self.decided.further, self.seen_after))

    def _of(self, decision: LoggedDecision, seen: Features | None) -> Logged:
        features = hashed_features(seen) if seen is not None else ()
        return Logged(features, decision.action, decision.propensity, self.reward, self.conversation)


@dataclass(slots=True)
class JournaledDecisions:
    """The decisions that the journal has."""

    rows: dict[Group, list[RewardedDecision]] = field(default_factory=dict)
    unrated: Counter[str] = field(default_factory=Counter)
    """Runs of each tier that have an answer and no score."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Rated runs that say nothing about other policies, by reason."""
    beliefs: dict[tuple[str, str], Beliefs] = field(default_factory=dict)
    """The learned values of each tier that has a selector, for each tenant."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The estimate of a policy from one group. `left_out` rows did not have its choice among their candidates."""

    group: Group
    policy: str
    left_out: int
    report: Report
    unrated: int = 0
    """Runs of the tier that have an answer and no score."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Print the estimates. Returns 1 if there was nothing to judge."""
    loaded = configure(environ)
    terminal.log_to_stderr("warning")
    for policy in args.policy:
        if policy not in (GREEDY, CURRENT, UNIFORM) and not policy.startswith(ALWAYS):
            raise ConfigInvalid([f"--policy: write {GREEDY}, {CURRENT}, {UNIFORM} or '{ALWAYS}ARM'"])
    storage.print_database(loaded.settings)
    found = event_loop.run(_read(loaded, args, now()))
    judged: list[Judged] = []
    for group, rows in sorted(found.rows.items()):
        of_group = _judged(group, rows, args.policy)
        judged += [replace(estimate, unrated=found.unrated[group[0]]) for estimate in of_group]
    if args.json:
        print(orjson.dumps([_shown(estimate) for estimate in judged], option=orjson.OPT_INDENT_2).decode())
    else:
        _print(found, judged)
    return int(not judged)


# -- reading


async def _read(loaded: Loaded, args: Arguments, now: float) -> JournaledDecisions:
    found = JournaledDecisions()
    query = RunQuery(tenant=args.tenant, tier=args.tier, limit=PAGE)
    if args.since:
        query = replace(query, since=now - args.since)
    async with storage.open_configured_store(loaded.settings) as store:
        rows = await store.runs(query)
        while rows:
            for row in rows:
                if row.ended_at is not None and row.origin_kind != "shadow":
                    await _note(store, loaded, row, found)
            query = replace(query, before=(rows[-1].created_at, rows[-1].id))
            rows = await store.runs(query)
    return found


async def _note(store: Store, loaded: Loaded, row: RunRow, found: JournaledDecisions) -> None:
    tier = loaded.catalog.tiers.get(row.tier)
    spec = None
    if tier is not None:
        spec = tier.conductor.selector
    reward = worth(await store.feedback(row.id), row.spent.usd, spec)
    if reward is None:
        found.unrated[row.tier] += row.state == "succeeded"
        return
    events = (await store.journal(row.id)).events
    decision = logged_decision(events)
    reason = _reason_not_usable(tier, decision)
    admitted = next(facts(events, RunAdmitted), None)
    if admitted is not None and admitted.served_by:
        reason = "something else served it in the tier's place"
    if reason or decision is None:
        found.skipped[reason] += 1
        return
    task = ""
    if admitted is not None:
        task = admitted.task
    seen, named = await _seen(store, row.id, decision, task)
    after = None
    if decision.further is not None:
        after, _ = await _seen(store, row.id, decision.further, task)
    beliefs = await _beliefs(store, loaded, row, found)
    read = RewardedDecision(decision, seen, reward, beliefs, named, after)
    found.rows.setdefault((row.tier, decision.layer, decision.shape), []).append(read)


async def _beliefs(store: Store, loaded: Loaded, row: RunRow, found: JournaledDecisions) -> Beliefs | None:
    """Return the present beliefs of the selector of a run's tier for the run's tenant."""
    tier = loaded.catalog.tiers.get(row.tier)
    if tier is None or tier.conductor.selector is None:
        return None
    place = row.tier, row.tenant
    if place not in found.beliefs:
        posterior = await posterior_of(store, row.tier, row.tenant)
        found.beliefs[place] = Beliefs(posterior, tier.conductor.selector, loaded.catalog.workers)
    return found.beliefs[place]


def _reason_not_usable(tier: Tier | None, decision: LoggedDecision | None) -> str:
    if decision is None:
        return "no answer, or a plan without probabilities"
    if decision.shape and (tier is None or tier.conductor.temperature != 1.0):
        return "the model decodes at a temperature other than 1, so its probabilities are not those of the draw"
    if decision.was_drawn:
        return ""
    return "nothing was left to chance"


async def _seen(store: Store, run: str, decision: LoggedDecision, task: str) -> tuple[Features | None, str]:
    """Return the features of a decision, which are the journaled ones of a selector or those of the task for a model,
    and the name of the conversation. Both are missing where the content was erased."""
    bodies = await store.contents(run, [ref for ref in (decision.features, task) if ref])
    seen, named = None, ""
    if task in bodies:
        messages = task_from_json(orjson.loads(bodies[task])).messages
        seen, named = features(words(messages)), conversation(messages)
    if decision.features:
        seen = None
    if decision.features in bodies:
        seen = from_json(orjson.loads(bodies[decision.features]))
    return seen, named


# -- judging


def _judged(group: Group, rows: Sequence[RewardedDecision], policies: Sequence[str]) -> list[Judged]:
    taken = Counter(row.decided.action for row in rows).most_common(FREQUENT)
    logs: dict[tuple[int, ...], Log] = {}
    found = []
    usual = [GREEDY, CURRENT, UNIFORM, *[f"{ALWAYS}{arm}" for arm, _ in taken]]
    for policy in policies or usual:
        choices: dict[int, tuple[Policy, Policy | None]] = {}
        for place, row in enumerate(rows):
            made = _choices(policy, row)
            if made is not None:
                choices[place] = made
        if not choices:
            continue
        places = tuple(choices)
        if places not in logs:
            logs[places] = Log([rows[place].logged for place in places])
        firsts, furthers = zip(*choices.values(), strict=True)
        found.append(Judged(group, policy, len(rows) - len(places), logs[places].report(firsts, furthers)))
    return found


def _choices(policy: str, row: RewardedDecision) -> tuple[Policy, Policy | None] | None:
    """Return the choices of a policy in the places of a row's decision and of its further one; None if it has none
    there."""
    decision, further = row.decided, row.decided.further
    first = _choice(policy, row, decision, row.seen, None)
    if first is None:
        return None
    if further is None:
        return (first, None)
    second = _choice(policy, row, further, row.seen_after, decision)
    if second is None:
        return None
    return (first, second)


def _choice(
    policy: str, row: RewardedDecision, decision: LoggedDecision, seen: Features | None, first: LoggedDecision | None
) -> Policy | None:
    if policy != CURRENT:
        return choice(policy, decision)
    if row.beliefs is None or seen is None or decision.shape:
        return None
    return row.beliefs.choice(decision, seen, first)


# -- printing


def _shown(judgement: Judged) -> dict[str, Any]:
    tier, layer, shape = judgement.group
    about = {"tier": tier, "layer": layer, "shape": shape, "policy": judgement.policy, "left_out": judgement.left_out}
    report = {**asdict(judgement.report), "verdict": judgement.report.verdict, "refusal": judgement.report.refusal}
    return {**about, **report, "unrated": judgement.unrated}


def _print(found: JournaledDecisions, judged: Sequence[Judged]) -> None:
    console = terminal.stdout()
    for group in dict.fromkeys(judgement.group for judgement in judged):
        tier, layer, shape = group
        rows = found.rows[group]
        earned = _in_words(mean([row.reward for row in rows]))
        about = ""
        if shape:
            about = f", plans of the shape {shape}"
        console.print(f"{tier}, {layer}{about}: {len(rows)} decisions, which earned {earned}", markup=False)
        console.print(_table([judgement for judgement in judged if judgement.group == group]))
        for judgement in judged:
            note = _note_on(judgement.report)
            if judgement.group == group and note:
                console.print(f"{judgement.report.verdict}, {judgement.policy}: {note}", markup=False)
        unrated = found.unrated[tier]
        if unrated:
            share = f"{len(rows) / (len(rows) + unrated):.0%}"
            console.print(
                f"runs of {tier} with an answer and no score: {unrated}; these rows are at most {share} of all, "
                "and the estimates are about runs that get a score",
                markup=False,
            )
    if found.rows and not judged:
        arms: set[str] = set()
        for row in chain.from_iterable(found.rows.values()):
            arms |= set(row.decided.candidates)
        console.print(f"No decision had that choice. The arms are: {', '.join(sorted(arms))}", markup=False)
    elif not judged:
        console.print("There are no rated runs whose plan was left to chance.")
    for reason, count in sorted(found.skipped.items()):
        console.print(f"rated, but not usable: {count}, because {reason}", markup=False)


def _note_on(report: Report) -> str:
    """Return what there is to say about a verdict: why there is none, and how far it depends on who rates."""
    if report.refusal:
        return report.refusal
    if report.verdict == "undecided":
        if report.needed is None:
            return "the advantage is too small for any number of rows"
        return f"about {max(report.needed - report.rows, 1)} more rows like these decide it, if the advantage stays"
    low, high = report.selected
    return (
        f"it stays if the odds of being rated differ by a factor of up to {report.selection:.1f} between runs; "
        f"by {SELECTION:.0f} the advantage is between {low:+.3f} and {high:+.3f}, without sampling error"
    )


def _table(judged: Sequence[Judged]) -> Table:
    table = terminal.table()
    table.add_column("policy")
    for column in ("rows", "ESS", "covered"):
        table.add_column(column, justify="right")
    for column in ("IPS", "SNIPS", "doubly robust", "ahead of the log", "verdict"):
        table.add_column(column)
    for judgement in judged:
        report = judgement.report
        figures = (f"{report.rows}", f"{report.ess:.0f}", f"{report.covered:.0%}")
        estimates = (report.ips, report.snips, report.dr, report.ahead)
        table.add_row(judgement.policy, *figures, *map(_in_words, estimates), report.verdict)
    return table


def _in_words(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
