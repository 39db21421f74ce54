"""`baton grade` rates journaled runs by rules and notes what their callers did, apart from what callers said.

A rating has a fixed id for each run, rule and version, so the command may be repeated over the same runs. Only answers
are graded: a run that failed, was stopped or was only planned has none, and an outage is not a wrong answer.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.learning import task_set
from app.cli.learning.sandbox import Sandbox
from app.core.message.chat import Message, task_from_json
from app.core.rating.feedback import SIGNS, Feedback, identify, repeats, sign
from app.core.run.events import Event, RunAdmitted, RunSucceeded, facts
from app.core.run.kinds import COPIES
from app.errors import ConfigInvalid, EventMalformed
from app.lab import grading
from app.lab.grading import Execute, Grader
from app.process.config import Settings, read
from app.store.protocol import RunQuery, RunRow, Store

FILTERS = {"--tier", "--tenant", "--since"}
"""Options that choose among runs."""


class Rule(Struct, frozen=True):
    """A grader with its text, and the question that it is for; None if it is for every run."""

    grader: Grader
    grader_text: str
    question: str | None


@dataclass(slots=True)
class GradedRuns:
    """The ratings that were made, and the runs that were left out."""

    ratings: list[Feedback] = field(default_factory=list)
    skip_counts: Counter[str] = field(default_factory=Counter)
    """Runs that were not rated, by reason."""


class EndedRun(Struct, frozen=True):
    """A run that has ended, with its conversation, which is None if it was erased."""

    row: RunRow
    events: Sequence[Event]
    messages: Sequence[Message] | None

    @property
    def is_preview(self) -> bool:
        """Return True if only a plan was asked for."""
        return any(fact.preview for fact in facts(self.events, RunAdmitted))

    @property
    def asks_for_answer(self) -> bool:
        """Return True if its caller has asked for an answer: neither for a plan alone, nor is it a copy of a run."""
        return not self.is_preview and self.row.origin_kind not in COPIES

    @property
    def question(self) -> str | None:
        """Return the user's last message."""
        for message in reversed(self.messages or ()):
            if message.role == "user":
                return _plain(message.text)
        return None


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Rate the runs, store the ratings and print a summary."""
    settings = read(environ)
    terminal.log_to_stderr("warning")
    sandbox = Sandbox(args.trust_code)
    rules = _rules(args, sandbox.run)
    sandbox.require_isolation(rule.grader for rule in rules)
    if args.run is not None and args.given & FILTERS:
        raise ConfigInvalid([f"--run names one run; remove {', '.join(sorted(args.given & FILTERS))}"])
    if not rules and not args.signs:
        raise ConfigInvalid(["say what to look for: --tasks FILE, --grader JSON or --signs"])
    storage.print_database(settings)
    report = event_loop.run(_rate(settings, args, rules, now))
    if args.json:
        terminal.print_json([_record(rating) for rating in report.ratings])
    else:
        _print(report, is_stored=not args.dry_run)
    return 0


# -- rules


def _rules(args: Arguments, execute: Execute) -> list[Rule]:
    """Return all rules. Raises `ConfigInvalid` with every fault."""
    faults: list[str] = []
    rules: list[Rule] = []
    for text in args.grader:
        graders = task_set.rule(text, "--grader", execute, faults)
        rules += [Rule(grader, grader_text, question=None) for grader, grader_text in graders]
    if args.tasks is not None:
        tasks = task_set.read(Path(args.tasks), execute, faults)
        rules += [Rule(task.grader, task.grader_text, _plain(task.question)) for task in tasks]
    if faults:
        raise ConfigInvalid(faults)
    return rules


def _plain(text: str) -> str:
    """Return a question with single spaces."""
    return " ".join(text.split())


# -- runs


async def _rate(settings: Settings, args: Arguments, rules: Sequence[Rule], now: Callable[[], float]) -> GradedRuns:
    report, began_at = GradedRuns(), now()
    by_question: dict[str | None, list[Rule]] = {}
    for rule in rules:
        by_question.setdefault(rule.question, []).append(rule)
    async with storage.open_configured_store(settings) as store:
        later: dict[str, EndedRun] = {}
        async for ended_run in _runs(store, args, report, began_at):
            if rules:
                await _grade(store, ended_run, by_question, report)
            if args.signs and ended_run.asks_for_answer:
                report.ratings += _signs(ended_run, later.get(ended_run.row.key))
                later[ended_run.row.key] = ended_run
        if not args.dry_run:
            for rating in report.ratings:  # selectors do not learn one whose time is some seconds ago
                await store.rate(replace(rating, at=now()))
    return report


async def _runs(store: Store, args: Arguments, report: GradedRuns, now: float) -> AsyncIterator[EndedRun]:
    """Yield the chosen runs that have ended, newest first. Those of several that cannot be read are counted."""
    if args.run is not None:
        yield await _read_run(store, await storage.find_run(store, args.run))
        return
    query = RunQuery(tenant=args.tenant, tier=args.tier, since=args.start(now))
    async for row in storage.every_run(store, query):
        if row.ended_at is None:
            continue
        try:
            ended_run = await _read_run(store, row)
        except EventMalformed:
            report.skip_counts["its journal cannot be read"] += 1
            continue
        yield ended_run


async def _read_run(store: Store, row: RunRow) -> EndedRun:
    events = (await store.journal(row.id)).events
    task = next((fact.task for fact in facts(events, RunAdmitted)), "")
    bodies = await store.contents(row.id, [task])
    messages = None
    if bodies:
        messages = task_from_json(orjson.loads(bodies[task])).messages
    return EndedRun(row, events, messages)


async def _grade(
    store: Store, ended_run: EndedRun, rules: Mapping[str | None, Sequence[Rule]], report: GradedRuns
) -> None:
    """Grade a run's answer by the rules for its question and by those for every run. Those of one kind make one rating,
    the mean of their scores: a kind is a source, of which the latest rating counts."""
    row = ended_run.row
    fitting = list(rules.get(None, ()))
    if ended_run.question is not None:
        fitting += rules.get(ended_run.question, ())
    if not fitting and ended_run.messages is None:
        report.skip_counts["its content was erased"] += 1
        return
    if not fitting:
        report.skip_counts["no rule is for its question"] += 1
        return
    end = next(facts(ended_run.events, RunSucceeded), None)
    if end is None or ended_run.is_preview:
        report.skip_counts[f"it has no answer ({row.state})"] += 1
        return
    answer = await _answer(store, row, end)
    if answer is None:
        report.skip_counts["its content was erased"] += 1
        return
    scores: dict[str, dict[str, float]] = {}
    for rule in fitting:
        grade = await asyncio.to_thread(rule.grader.grade, answer)
        scores.setdefault(rule.grader.kind, {})[rule.grader_text] = grade.score
    for kind, by_rule in scores.items():
        rating = _feedback(row, kind="grader", source=kind, version=grading.VERSION)
        rule_texts = "\0".join(sorted(by_rule))
        report.ratings.append(identify(replace(rating, score=fmean(by_rule.values())), rule=rule_texts))


async def _answer(store: Store, row: RunRow, end: RunSucceeded) -> str | None:
    """Return the answer of a run; None if it was erased."""
    if not end.answer:
        return ""
    bodies = await store.contents(row.id, [end.answer])
    if end.answer not in bodies:
        return None
    return bodies[end.answer].decode("utf-8", "replace")


def _signs(ended_run: EndedRun, later: EndedRun | None) -> Iterator[Feedback]:
    """Yield the signs in what the caller did with a run. `later` is the next run of the same key."""
    row = ended_run.row
    names = [sign(ended_run.events)]
    if later is not None and ended_run.messages is not None and later.messages is not None and row.ended_at is not None:
        again = repeats(ended_run.messages, later.messages, later.row.created_at - row.ended_at)
        if again and row.state == "succeeded":
            names.append("regenerated")
    for name in names:
        if name:
            rating = _feedback(row, kind="implicit", source=name, version=SIGNS)
            yield identify(replace(rating, label=name))


def _feedback(row: RunRow, *, kind: Literal["grader", "implicit"], source: str, version: str) -> Feedback:
    """Return feedback on a run that no key of a caller has given, still without its id, its verdict and its time."""
    return Feedback(id="", run=row.id, tenant=row.tenant, key="", at=0.0, kind=kind, source=source, version=version)


# -- printing


def _record(rating: Feedback) -> dict[str, Any]:
    fields = ("id", "run", "kind", "source", "version", "score", "label")
    return {name: getattr(rating, name) for name in fields}


def _print(report: GradedRuns, *, is_stored: bool) -> None:
    table = terminal.table()
    for column in ("kind", "source", "version"):
        table.add_column(column)
    for column in ("runs", "mean score"):
        table.add_column(column, justify="right")
    groups: dict[tuple[str, str, str], list[Feedback]] = {}
    for rating in report.ratings:
        groups.setdefault((rating.kind, rating.source, rating.version), []).append(rating)
    for names, ratings in sorted(groups.items()):
        scores = [rating.score for rating in ratings if rating.score is not None]
        mean = "-"
        if scores:
            mean = f"{sum(scores) / len(scores):.3f}"
        terminal.add_row(table, (*names, str(len(ratings)), mean))
    console = terminal.stdout()
    terminal.print_table(table, "Nothing was found.")
    for reason, count in sorted(report.skip_counts.items()):
        console.print(f"not graded: {count}, because {reason}")
    if not is_stored and groups:
        console.print("Nothing was stored (--dry-run).")
