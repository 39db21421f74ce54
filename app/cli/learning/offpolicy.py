"""`baton offpolicy` estimates what other policies would have earned, from rated runs whose plan was drawn at random.

Each decision is weighted by the probability with which it was drawn, which was journaled before it took effect. A
policy gets no verdict if too few decisions support it (`app/lab/offpolicy.py`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec
import orjson
from msgspec import Struct
from msgspec.structs import replace
from rich.table import Table

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.core.message.chat import task_from_json
from app.core.plan.arms import tier_of
from app.core.pool.catalog import Tier
from app.core.rating.features import Features, features, find_last_question, from_json
from app.core.run.events import RunAdmitted, facts
from app.core.run.kinds import COPIES
from app.engine.conductors.ratings import posterior_of
from app.errors import ConfigInvalid, EventMalformed
from app.lab.logged_decisions import (
    ALWAYS,
    CURRENT,
    GREEDY,
    UNIFORM,
    Beliefs,
    LoggedDecision,
    choice,
    conversation,
    hash_features,
    read_decision,
    worth,
)
from app.lab.offpolicy import SELECTION, Estimate, Log, LoggedOutcome, Policy, Report, mean
from app.process.config import Configuration, configure
from app.store.protocol import RunQuery, RunRow, Store

DEFAULT_ARMS = 6
"""The number of arms that are judged by default: those that were taken most often."""

Group = tuple[str, str, str]
"""Tier, layer and shape, whose decisions are judged together."""


class RewardedDecision(Struct, frozen=True):
    """A decision and its reward. `features` is None if the request was erased; then only the arms are known."""

    decision: LoggedDecision
    features: Features | None
    reward: float
    beliefs: Beliefs | None = None
    """The beliefs of the tier's selector for the tenant of the run; None where the tier has no selector."""
    conversation: str = ""
    """The name of the conversation; empty if it was erased."""
    further_features: Features | None = None
    """The features by which the selector decided about the answer in a second round; None if there was none."""

    @property
    def log_row(self) -> LoggedOutcome:
        """Return the row in the form that the estimators read."""
        first = self._of(self.decision, self.features)
        if self.decision.further is None:
            return first
        return replace(first, further=self._of(self.decision.further, self.further_features))

    def _of(self, decision: LoggedDecision, request_features: Features | None) -> LoggedOutcome:
        hashes: tuple[float, ...] = ()
        if request_features is not None:
            hashes = hash_features(request_features)
        return LoggedOutcome(hashes, decision.action, decision.propensity, self.reward, self.conversation)


@dataclass(slots=True)
class JournaledDecisions:
    """The decisions that the journal has."""

    rows: dict[Group, list[RewardedDecision]] = field(default_factory=dict)
    unrated_runs: Counter[str] = field(default_factory=Counter)
    """Runs of each tier that have an answer and no score; replays aside, whose answers no caller sees."""
    skip_counts: Counter[str] = field(default_factory=Counter)
    """Rated runs that say nothing about other policies, by reason."""
    beliefs: dict[tuple[str, str], Beliefs] = field(default_factory=dict)
    """The learned values of each tier that has a selector, for each tenant."""


class Judgement(Struct, frozen=True):
    """The estimate of a policy from one group. `left_out` rows did not have its choice among their candidates."""

    group: Group
    policy: str
    left_out: int
    report: Report
    unrated_runs: int = 0
    """Runs of the tier that have an answer and no score."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Print the estimates. Returns 1 if there was nothing to judge."""
    config = configure(environ)
    terminal.log_to_stderr("warning")
    for policy in args.policy:
        if policy not in (GREEDY, CURRENT, UNIFORM) and not policy.startswith(ALWAYS):
            raise ConfigInvalid([f"--policy: write {GREEDY}, {CURRENT}, {UNIFORM} or '{ALWAYS}ARM'"])
    storage.print_database(config.settings)
    decisions = event_loop.run(_read(config, args, now()))
    judgements: list[Judgement] = []
    for group, rows in sorted(decisions.rows.items()):
        estimates = _judge(group, rows, args.policy)
        judgements += [replace(estimate, unrated_runs=decisions.unrated_runs[group[0]]) for estimate in estimates]
    if args.json:
        terminal.print_json([_record(estimate) for estimate in judgements])
    else:
        _print(decisions, judgements)
    return int(not judgements)


# -- reading


async def _read(config: Configuration, args: Arguments, now: float) -> JournaledDecisions:
    decisions = JournaledDecisions()
    query = RunQuery(tenant=args.tenant, tier=args.tier, since=args.start(now), preview=False)
    async with storage.open_configured_store(config.settings) as store:
        async for row in storage.every_run(store, query):
            if row.ended_at is None or row.origin_kind == "shadow":
                continue
            try:
                await _note(store, config, row, decisions)
            except EventMalformed:
                decisions.skip_counts["its journal cannot be read"] += 1
    return decisions


async def _note(store: Store, config: Configuration, row: RunRow, decisions: JournaledDecisions) -> None:
    tier = config.catalog.tiers.get(row.tier)
    spec = None
    if tier is not None:
        spec = tier.conductor.selector
    reward = worth(await store.feedback(row.id), row.spent.usd, spec)
    if reward is None:
        has_caller = row.origin_kind not in COPIES
        decisions.unrated_runs[row.tier] += has_caller and row.state == "succeeded"
        return
    events = (await store.journal(row.id)).events
    decision = read_decision(events)
    reason = _reason_not_usable(tier_of(config.catalog, row.tier, row.model), decision)
    admission = next(facts(events, RunAdmitted), None)
    if admission is not None and admission.served_by:
        reason = "something else served it in the tier's place"
    if reason or decision is None:
        decisions.skip_counts[reason] += 1
        return
    task = ""
    if admission is not None:
        task = admission.task
    request_features, conversation_name = await _read_features(store, row.id, decision, task)
    further_features = None
    if decision.further is not None:
        further_features, _ = await _read_features(store, row.id, decision.further, task)
    beliefs = await _beliefs(store, config, row, decisions)
    rewarded_decision = RewardedDecision(
        decision, request_features, reward, beliefs, conversation_name, further_features
    )
    decisions.rows.setdefault((row.tier, decision.layer, decision.shape), []).append(rewarded_decision)


async def _beliefs(store: Store, config: Configuration, row: RunRow, decisions: JournaledDecisions) -> Beliefs | None:
    """Return what the selector of the run's tier believes at present for the run's tenant; None without a selector."""
    tier = config.catalog.tiers.get(row.tier)
    if tier is None or tier.conductor.selector is None:
        return None
    place = row.tier, row.tenant
    if place not in decisions.beliefs:
        posterior = await posterior_of(store, row.tier, row.tenant)
        decisions.beliefs[place] = Beliefs(posterior, tier.conductor.selector, config.catalog.workers)
    return decisions.beliefs[place]


def _reason_not_usable(tier: Tier | None, decision: LoggedDecision | None) -> str:
    """Return why a decision says nothing of other policies; empty if it does. `tier` is that of the run's model, which
    may be an arm."""
    if decision is None:
        return "no answer, or a plan without probabilities"
    if decision.shape and (tier is None or tier.conductor.temperature != 1.0):
        return "the model decodes at a temperature other than 1, so its probabilities are not those of the draw"
    if decision.was_drawn:
        return ""
    return "nothing was left to chance"


async def _read_features(store: Store, run: str, decision: LoggedDecision, task: str) -> tuple[Features | None, str]:
    """Return the features by which a decision was made, and the name of the conversation.

    A selector journals its features; for the decision of a model they are computed from the task. Both results are
    missing where the content was erased."""
    bodies = await store.contents(run, [ref for ref in (decision.features, task) if ref])
    request_features, conversation_name = None, ""
    if task in bodies:
        messages = task_from_json(orjson.loads(bodies[task])).messages
        request_features, conversation_name = features(find_last_question(messages)), conversation(messages)
    if decision.features:
        request_features = None
    if decision.features in bodies:
        request_features = from_json(orjson.loads(bodies[decision.features]))
    return request_features, conversation_name


# -- judging


def _judge(group: Group, rows: Sequence[RewardedDecision], policies: Sequence[str]) -> list[Judgement]:
    frequent_actions = Counter(row.decision.action for row in rows).most_common(DEFAULT_ARMS)
    logs: dict[tuple[int, ...], Log] = {}
    judgements = []
    usual = [GREEDY, CURRENT, UNIFORM, *[f"{ALWAYS}{arm}" for arm, _ in frequent_actions]]
    for policy in policies or usual:
        choices: dict[int, tuple[Policy, Policy | None]] = {}
        for place, row in enumerate(rows):
            pair = _choices(policy, row)
            if pair is not None:
                choices[place] = pair
        if not choices:
            continue
        places = tuple(choices)
        if places not in logs:
            logs[places] = Log([rows[place].log_row for place in places])
        firsts, furthers = zip(*choices.values(), strict=True)
        judgements.append(Judgement(group, policy, len(rows) - len(places), logs[places].report(firsts, furthers)))
    return judgements


def _choices(policy: str, row: RewardedDecision) -> tuple[Policy, Policy | None] | None:
    """Return the choices of a policy in the places of a row's decision and of its further one; None if it has none
    there."""
    decision, further = row.decision, row.decision.further
    first = _choice(policy, row, decision, row.features, None)
    if first is None:
        return None
    if further is None:
        return (first, None)
    second = _choice(policy, row, further, row.further_features, decision)
    if second is None:
        return None
    return (first, second)


def _choice(
    policy: str,
    row: RewardedDecision,
    decision: LoggedDecision,
    request_features: Features | None,
    first: LoggedDecision | None,
) -> Policy | None:
    if policy != CURRENT:
        return choice(policy, decision)
    if row.beliefs is None or request_features is None or decision.shape:
        return None
    return row.beliefs.choice(decision, request_features, first)


# -- printing


def _record(judgement: Judgement) -> dict[str, Any]:
    tier, layer, shape = judgement.group
    about = {"tier": tier, "layer": layer, "shape": shape, "policy": judgement.policy, "left_out": judgement.left_out}
    report = {
        **msgspec.to_builtins(judgement.report),
        "verdict": judgement.report.verdict,
        "refusal": judgement.report.refusal,
    }
    return {**about, **report, "unrated": judgement.unrated_runs}


def _print(decisions: JournaledDecisions, judgements: Sequence[Judgement]) -> None:
    console = terminal.stdout()
    for group in dict.fromkeys(judgement.group for judgement in judgements):
        tier, layer, shape = group
        rows = decisions.rows[group]
        reward = _in_words(mean([row.reward for row in rows]))
        about = ""
        if shape:
            about = f", plans of the shape {shape}"
        console.print(f"{tier}, {layer}{about}: {len(rows)} decisions, which earned {reward}")
        console.print(_table([judgement for judgement in judgements if judgement.group == group]))
        for judgement in judgements:
            note = _note_on(judgement.report)
            if judgement.group == group and note:
                console.print(f"{judgement.report.verdict}, {judgement.policy}: {note}")
        unrated_runs = decisions.unrated_runs[tier]
        if unrated_runs:
            share = f"{len(rows) / (len(rows) + unrated_runs):.0%}"
            console.print(
                f"runs of {tier} with an answer and no score: {unrated_runs}; these rows are at most {share} of all, "
                "and the estimates are about runs that get a score",
            )
    if decisions.rows and not judgements:
        arms: set[str] = set()
        for row in chain.from_iterable(decisions.rows.values()):
            arms |= set(row.decision.candidates)
        console.print(f"No decision had that choice. The arms are: {', '.join(sorted(arms))}")
    elif not judgements:
        console.print(
            "There are no rated runs whose plan was drawn at random. Rate runs of a tier with a selector that "
            "explores, or with a model that conducts at temperature 1."
        )
    for reason, count in sorted(decisions.skip_counts.items()):
        console.print(f"rated, but not usable: {count}, because {reason}")


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


def _table(judgements: Sequence[Judgement]) -> Table:
    table = terminal.table()
    table.add_column("policy")
    for column in ("rows", "ESS", "covered"):
        table.add_column(column, justify="right")
    for column in ("IPS", "SNIPS", "doubly robust", "ahead of the log", "verdict"):
        table.add_column(column)
    for judgement in judgements:
        report = judgement.report
        figures = (f"{report.rows}", f"{report.ess:.0f}", f"{report.covered:.0%}")
        estimates = (report.ips, report.snips, report.dr, report.ahead)
        terminal.add_row(table, (judgement.policy, *figures, *map(_in_words, estimates), report.verdict))
    return table


def _in_words(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
