"""`baton calibrate` gives every worker the same tasks, once each, and stores its scores.

The tasks are the built-in ones, or those of a file. Each task is a run like any other, over exactly one worker:
journaled, within its budget, carried out by the engine. Its score is stored at once, so that an interrupted calibration
continues where it stopped. A failed call says nothing about what its worker can do: it is not a trial, and is repeated
the next time. Nor is a run that waits for an approval, which is asked to end.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import cast

from msgspec import Struct
from msgspec.structs import asdict, replace
from rich.progress import Progress
from rich.table import Table

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.embedded import engine
from app.cli.learning import task_set
from app.cli.learning.sandbox import Sandbox
from app.cli.learning.task_set import GradedTask
from app.core.message.chat import Message, Role, Text, Usage
from app.core.pool.catalog import Catalog, Limits, Tier, Worker
from app.core.pool.policy import Overrides, input_bound, worst_case
from app.core.rating.calibration import SOURCE, Rate, Trial, are_indistinguishable, of_worker, rates
from app.core.rating.feedback import Feedback, identify
from app.core.rating.forecast import OUTPUT_TOKENS
from app.core.run.kinds import WAITING
from app.engine.delivery.messages import TurnEnd
from app.engine.runs import cancellation
from app.engine.runs.admission import Order
from app.errors import BatonError, ConfigInvalid, InvalidRequest
from app.lab.calibration_tasks import BuiltIn, make_built_in_tasks
from app.process.config import Configuration, configure
from app.process.wiring import Runtime

KEY = "baton-calibrate"
"""The name of the key in the journal."""
MAX_ATTEMPTS = 2
MAX_RUN_SECONDS = 180.0
NO_DIFFERENCE_NOTE = (
    "These tasks tell no two of the workers apart: nobody learns from them which worker is better. "
    "Calibrate with tasks like those of your callers: baton calibrate --tasks FILE."
)
MAX_OUTAGES_IN_A_ROW = 5
"""Tasks of one worker in a row without a trial after which it gets no further ones."""


class Assignment(Struct, frozen=True):
    """One task for one worker, over a tier that has the worker in its pool, with its limits."""

    worker: Worker
    tier: Tier
    built_in: BuiltIn
    limits: Limits

    @property
    def likely(self) -> int:
        """Return the micro-dollars of a usual answer."""
        input_tokens = input_bound(self.built_in.task.messages) // 4
        return self.worker.price.cost(Usage(input=input_tokens, output=min(OUTPUT_TOKENS, self.limits.output_tokens)))

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return the key of the trial that it becomes."""
        return (self.worker.name, self.worker.model, self.built_in.version, self.built_in.name)


@dataclass(slots=True)
class CalibrationProgress:
    """The progress of a calibration."""

    trials: list[Trial] = field(default_factory=list)
    outages: Counter[str] = field(default_factory=Counter)
    """Failed calls, by worker."""
    waiting: Counter[str] = field(default_factory=Counter)
    """Runs that waited for an approval, by worker."""
    in_a_row: Counter[str] = field(default_factory=Counter)
    """Tasks in a row that came to no trial, by worker."""
    spent: int = 0
    promised: int = 0
    """Micro-dollars that the runs in progress may still cost."""
    short: bool = False
    """True if the money of `--usd` was not enough for all tasks."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Calibrate and print the table. Returns 1 if some tasks could not be tried."""
    config = configure(environ)
    terminal.log_to_stderr("error")
    storage.print_database(config.settings)
    tasks = _tasks(args)
    trials = event_loop.run(_read_trials(config))
    assignments = list(_assignments(config.catalog, args, tasks))
    trial_keys = {trial.key for trial in trials}
    remaining: list[Assignment] = []
    if not args.show:
        remaining = [task for task in assignments if args.again or task.key not in trial_keys]
    progress = CalibrationProgress()
    if remaining and _ask_for_confirmation(
        args, remaining, len(assignments) - len(remaining), config.catalog.rehearsal
    ):
        with Progress(console=terminal.stderr(), transient=True) as bar:
            step = bar.add_task("calibrating", total=len(remaining))
            event_loop.run(_calibrate(config, args, remaining, progress, now, lambda: bar.advance(step)))
        trials = event_loop.run(_read_trials(config))
    _print(args, config.catalog, trials, progress)
    measured_keys = {trial.key for trial in trials}
    if args.again:  # trials of an earlier calibration have the same keys
        measured_keys = {trial.key for trial in progress.trials}
    missing = any(task.key not in measured_keys for task in assignments)
    return int(missing and not args.show)


async def _read_trials(config: Configuration) -> tuple[Trial, ...]:
    async with storage.open_configured_store(config.settings) as store:
        return await store.trials()


# -- tasks


def _tasks(args: Arguments) -> Sequence[BuiltIn]:
    """Return the tasks of `--tasks`, or the built-in ones. Raises `ConfigInvalid` for a file with faults."""
    if not args.tasks:
        return make_built_in_tasks(args.each)
    sandbox = Sandbox(args.trust_code)

    def read(faults: list[str]) -> list[GradedTask]:
        return task_set.read(Path(args.tasks), sandbox.run, faults)

    tasks = task_set.require_valid(read)
    sandbox.require_isolation(task.grader for task in tasks)
    version = f"file-{task_set.digest(tasks)[:16]}"
    return [_of_file(task, version) for task in tasks]


def _of_file(task: GradedTask, version: str) -> BuiltIn:
    messages = [Message(cast(Role, message["role"]), (Text(message["content"]),)) for message in task.messages]
    family = task.family or "tasks"
    return BuiltIn(task.id, family, family, 0, task.question, task.grader, version, tuple(messages))


def _assignments(catalog: Catalog, args: Arguments, tasks: Sequence[BuiltIn]) -> Iterator[Assignment]:
    """Yield the tasks in turn, each for all workers, so that no provider gets all of its requests at once."""
    tiers: dict[str, Tier] = {}
    for tier in reversed(list(catalog.tiers.values())):
        tiers |= dict.fromkeys(tier.pool, tier)
    requested = set(args.worker) or set(tiers)
    unknown = sorted(requested - set(tiers))
    if unknown:
        raise ConfigInvalid([f"--worker: no tier has {', '.join(unknown)}; there are {', '.join(sorted(tiers))}"])
    worker_names = [name for name in catalog.workers if name in requested]
    for task in tasks:
        for name in worker_names:
            worker = catalog.workers[name]
            yield Assignment(worker, tiers[name], task, _limits(worker, tiers[name], task, args.tokens))


def _limits(worker: Worker, tier: Tier, task: BuiltIn, tokens: int) -> Limits:
    """Return limits within the tier's own, for one call and one retry."""
    tier_limits = tier.efforts[tier.effort]
    tokens = min(tokens, worker.card.max_output, tier_limits.output_tokens)
    attempts = min(MAX_ATTEMPTS, tier_limits.attempts)
    most = attempts * worst_case(worker, input_bound(task.task.messages), tokens).usd
    seconds = min(MAX_RUN_SECONDS, tier_limits.seconds)
    return replace(
        tier_limits,
        steps=1,
        rounds=1,
        attempts=attempts,
        output_tokens=tokens,
        usd=min(most, tier_limits.usd),
        seconds=seconds,
    )


def _ask_for_confirmation(args: Arguments, remaining: Sequence[Assignment], before: int, rehearsal: bool) -> bool:
    """Print the cost and, without `--yes`, ask for consent, unless the workers are simulated."""
    workers = ", ".join(dict.fromkeys(task.worker.name for task in remaining))
    likely = sum([task.likely for task in remaining])
    most = sum([task.limits.usd for task in remaining])
    unpriced = ", ".join(dict.fromkeys(task.worker.name for task in remaining if not task.worker.priced))
    if unpriced and args.usd is not None:
        raise ConfigInvalid(
            [f"--usd: nobody knows what {unpriced} costs; add its price to the pool file, or name others by --worker"]
        )
    console = terminal.stderr()
    console.print(
        f"{terminal.count(len(remaining), 'task')} for {workers} ({before} were tried before): likely "
        f"{terminal.dollars(likely)} ({OUTPUT_TOKENS} output tokens an answer), at most {terminal.dollars(most)}."
    )
    if unpriced:
        console.print(f"What {unpriced} costs is not in the pool file, and not in these sums.")
    if args.usd is not None:
        console.print(f"It stops before more than {terminal.dollars(args.usd)} could be spent.")
    if args.yes or rehearsal or not (most or unpriced):
        return True
    if not sys.stdin.isatty():
        raise ConfigInvalid(
            ["--yes: standard input is not a terminal, so nobody can be asked; add it if you accept the cost"]
        )
    return console.input("Go on? (y/N) ").strip().casefold() in ("y", "yes")


# -- carrying it out


async def _calibrate(
    config: Configuration,
    args: Arguments,
    remaining: Sequence[Assignment],
    progress: CalibrationProgress,
    now: Callable[[], float],
    advance: Callable[[], object],
) -> None:
    waiting = iter(remaining)
    async with engine.start_engine(config, args.concurrency, dispatches=True) as runtime:

        async def work() -> None:
            for task in waiting:
                if progress.in_a_row[task.worker.name] < MAX_OUTAGES_IN_A_ROW and _affordable(args.usd, task, progress):
                    await _try(runtime, task, progress, now)
                advance()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(args.concurrency, len(remaining))):
                group.create_task(work())


def _affordable(cap: int | None, task: Assignment, progress: CalibrationProgress) -> bool:
    if cap is not None and progress.spent + progress.promised + task.limits.usd > cap:
        progress.short = True
        return False
    return True


async def _try(runtime: Runtime, task: Assignment, progress: CalibrationProgress, now: Callable[[], float]) -> None:
    progress.promised += task.limits.usd
    try:
        end = await engine.run_to_end(runtime, _order(task))
    except BatonError as error:
        if not isinstance(error, InvalidRequest):  # its end was not heard of: it may have cost its limit, or may yet
            progress.spent += task.limits.usd
        progress.outages[task.worker.name] += 1
        progress.in_a_row[task.worker.name] += 1
        return
    finally:
        progress.promised -= task.limits.usd
    if end.state.state in WAITING:
        store = runtime.context.store
        await cancellation.ask(store, None, await store.run(end.state.run), "operator", runtime.context.now())
        progress.waiting[task.worker.name] += 1
        progress.in_a_row[task.worker.name] += 1
        return
    progress.spent += end.bill.usd
    if end.error is not None:
        progress.outages[task.worker.name] += 1
        progress.in_a_row[task.worker.name] += 1
        return
    progress.in_a_row[task.worker.name] = 0
    grade = await asyncio.to_thread(task.built_in.grader.grade, end.answer)
    trial = _trial(task, end, now(), grade.score)
    await runtime.context.store.note_trial(trial)
    rating = Feedback(
        id="",
        run=trial.run,
        tenant="default",
        key="",
        at=trial.at,
        kind="grader",
        source=SOURCE,
        version=trial.version,
        score=trial.score,
    )
    await runtime.context.store.rate(identify(rating, rule=trial.task))
    progress.trials.append(trial)


def _order(task: Assignment) -> Order:
    """Return the request for a run over this worker alone."""
    return Order(
        task=task.built_in.task,
        tier=task.tier,
        model=task.tier.name,
        effort=task.tier.effort,
        limits=task.limits,
        tenant="default",
        key=KEY,
        overrides=Overrides(pin=task.worker.name),
        plan={"steps": [{"worker": task.worker.name, "subtask": "", "access": ["user"]}]},
    )


def _trial(assignment: Assignment, end: TurnEnd, at: float, score: float) -> Trial:
    task = assignment.built_in
    return Trial(
        *assignment.key,
        domain=task.domain,
        family=task.family,
        level=task.level,
        question=task.question,
        run=end.state.run,
        at=at,
        score=score,
        usd=end.bill.usd,
        seconds=sum(call.seconds for call in end.state.calls.values()),
    )


# -- printing


def _print(args: Arguments, catalog: Catalog, trials: Sequence[Trial], progress: CalibrationProgress) -> None:
    if args.json:
        terminal.print_json([asdict(trial) for trial in trials])
        return
    by_worker: dict[str, Sequence[Trial]] = {}
    for name, worker in catalog.workers.items():
        own_trials = of_worker(trials, worker)
        if own_trials:
            by_worker[name] = own_trials
    console = terminal.stdout()
    if by_worker:
        console.print(_table(by_worker))
    else:
        console.print("Nothing was measured yet.")
    if are_indistinguishable(by_worker):
        console.print(NO_DIFFERENCE_NOTE)
    if progress.trials or progress.spent:
        console.print(f"{terminal.count(len(progress.trials), 'trial')}, {terminal.dollars(progress.spent)}.")
    _print_lacking(progress)
    if progress.short:
        console.print("The money of --usd was not enough for the rest.")


def _print_lacking(progress: CalibrationProgress) -> None:
    """Print which tasks came to no trial, and why."""
    console = terminal.stdout()
    for name, count in sorted(progress.outages.items()):
        failures = f"{terminal.count(count, 'call')} failed"
        console.print(f"{name}: {failures}; what failed is no trial, and is repeated the next time.")
    for name, count in sorted(progress.waiting.items()):
        console.print(
            f"{name}: {terminal.count(count, 'run')} waited for an approval; they are no trials, and were cancelled.",
            soft_wrap=True,
        )
    for name, count in sorted(progress.in_a_row.items()):
        if count >= MAX_OUTAGES_IN_A_ROW:
            console.print(f"{name}: {MAX_OUTAGES_IN_A_ROW} of them in a row, so it got no further tasks.")


def _table(by_worker: Mapping[str, Sequence[Trial]]) -> Table:
    """Return the pass rates of each worker by family, with their 95 % intervals."""
    table = terminal.table()
    for column in ("domain", "family", *by_worker):
        table.add_column(column)
    trials = list(chain.from_iterable(by_worker.values()))
    by_family = [rates(own, lambda trial: trial.family) for own in by_worker.values()]
    overall = [rates(own, lambda trial: "") for own in by_worker.values()]
    by_level = [rates(own, lambda trial: str(trial.level)) for own in by_worker.values()]
    for domain, family in sorted({(trial.domain, trial.family) for trial in trials}):
        cells = [_cell(worker_rates.get(family)) for worker_rates in by_family]
        terminal.add_row(table, (domain, family, *cells))
    table.add_row("", "all", *[_cell(worker_rates.get("")) for worker_rates in overall])
    for level in sorted({trial.level for trial in trials}):
        table.add_row("", f"level {level + 1}", *[_cell(worker_rates.get(str(level))) for worker_rates in by_level])
    return table


def _cell(rate: Rate | None) -> str:
    if rate is None:
        return "-"
    low, high = rate.ends
    return f"{rate.value:.0%} [{low:.0%}, {high:.0%}]"
