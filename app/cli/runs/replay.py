"""`baton replay` carries out past runs once more and compares each with its replay; `baton runs diff` compares two.

The replays are runs of the configured database, made by an engine of this command's own, so that another pool file can
be tried without a service that has it. They belong to their runs' tenants and to the key `baton-replay`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import orjson
from msgspec import Struct
from msgspec.structs import replace
from rich.table import Table

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.audit import content_reads
from app.cli.embedded import engine
from app.cli.runs.run_list import query_of
from app.core.plan.arms import tier_for, tier_of
from app.core.pool.catalog import Catalog, Tier
from app.core.pool.snapshot import restore_catalog, seal_catalog
from app.core.rating.comparison import Comparison, PairedDifference, Recipient, in_unit, pair_differences
from app.core.run.kinds import WAITING
from app.engine.runs import replays
from app.engine.runs.admission import Order
from app.engine.runs.replays import Changes
from app.errors import BatonError, ConfigInvalid, EventMalformed, InvalidRequest
from app.gateway.runs import replay
from app.gateway.wire.parameters import nearest_effort
from app.lab.paired_statistics import Interval, interval, paired_bootstrap
from app.process.config import Configuration, configure, read
from app.process.wiring import Runtime
from app.store.protocol import RunRow, Store

REPLAY_KEY = "baton-replay"
"""The key of runs that `baton replay` has made."""
CONFIGURATION_OPTIONS = ("tier", "version", "worker", "plan", "effort", "conductor", "snapshot")
"""The names that `--under` accepts."""
MAX_SAMPLED_RUNS = 10_000
"""Most runs among which `--seed` draws."""
RESAMPLES = 2_000
WAIT_SECONDS = 1.0
"""Seconds after which a replay that waits for tools is taken for one that has no recorded results for its calls, and
one that waits for an approval is left to those who decide."""
POLL_SECONDS = 0.05
SELECTIONS = (
    *("since", "seed", "state", "tier", "worker", "label", "topology"),
    *("model", "user", "metadata", "key", "tenant"),
)
"""Options that choose the runs to replay, in place of their ids."""
REPLAYED_BEFORE = "replayed before"
"""The reason why a run is left out of which the file of `--out` has a replay."""
FIRST_BYTES = b'{"run":'
"""The beginning of a file of `--out`."""
SAME_ANSWER: Mapping[bool | None, str] = {True: "same", False: "other", None: "unknown"}
SAME_ANSWER_SENTENCES: Mapping[bool | None, str] = {
    True: "The answers are the same.",
    False: "The answers differ.",
    None: "An answer is missing or erased.",
}
SAME_OUTPUT: Mapping[bool | None, str] = {
    True: "the same output",
    False: "another output",
    None: "an output that is missing or erased",
}
"""The words for whether two answers, or two outputs of steps, are the same; None: it cannot be known."""


class ReplayedRun(Struct, frozen=True):
    """A run, and its replay or the reason why there is none."""

    run: str
    replay: str = ""
    comparison: Comparison | None = None
    refusal: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the pair as `--out` writes it, one on each line."""
        comparison = None
        if self.comparison is not None:
            comparison = self.comparison.to_json()
        return {
            "run": self.run,
            "replay": self.replay or None,
            "refused": self.refusal or None,
            "comparison": comparison,
        }


@dataclass(slots=True)
class Money:
    """The dollars that the replays may cost together, in micro-dollars. Each is given a part before it begins."""

    most: int | None
    slots: int
    spent: int = 0
    reserved: int = 0
    dearest: int = 0

    def part(self, limit: int, usual: int) -> int | None:
        """Hold the most that one replay may cost; None if what is left does not suffice for a usual one."""
        if self.most is None:
            return limit
        part = min(limit, (self.most - self.spent - self.reserved) // max(self.slots, 1))
        if part < max(usual, self.dearest, 1):
            return None
        self.reserved += part
        return part

    def settle(self, part: int, cost: int | None) -> None:
        """Note what a replay has cost. None: its end was not heard of, so that it may have cost its whole part, or may
        cost it yet."""
        if self.most is not None:
            self.reserved -= part
        if cost is None:
            self.spent += part
            return
        self.spent += cost
        self.dearest = max(self.dearest, cost)


@dataclass(slots=True)
class Batch:
    """The replays of one command."""

    runtime: Runtime
    args: Arguments
    under: Mapping[str, str]
    money: Money
    pairs: list[ReplayedRun] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Replay the runs, or compare two. Returns 1 if a run could not be replayed, or none was and none had been."""
    terminal.log_to_stderr("warning")
    if args.verb == "diff":
        return _compare_two(args, environ)
    config, under = configure(environ), _parse_configuration(args)
    storage.print_database(config.settings)
    batch = event_loop.run(_replay(config, args, under, now))
    differences = _intervals(batch, args.seed or 0)
    if args.json:
        pairs = [pair.to_json() for pair in batch.pairs]
        metrics = [_metric(metric, spread) for metric, spread in differences]
        summed_up = {"object": "replays", "pairs": pairs, "metrics": metrics, "left_out": dict(batch.left_out)}
        terminal.print_json(summed_up)
    else:
        _print(batch, differences)
    all_were_replayed_before = batch.left_out.keys() == {REPLAYED_BEFORE}
    if all_were_replayed_before or (batch.pairs and not any(pair.refusal for pair in batch.pairs)):
        return 0
    return 1


def _parse_configuration(args: Arguments) -> Mapping[str, str]:
    configuration: dict[str, str] = {}
    for text in args.under:
        name, is_given, value = text.partition("=")
        if name not in CONFIGURATION_OPTIONS or not is_given or not value:
            raise ConfigInvalid([f"--under: must be NAME=VALUE, with one of {', '.join(CONFIGURATION_OPTIONS)}"])
        configuration[name] = value
    if "plan" in configuration:
        _read_plan(configuration["plan"])
    if args.from_step is not None and len(args.run) != 1:
        raise ConfigInvalid(["--from-step: replay one run, because steps of different runs have nothing in common"])
    if not args.run and args.since is None:
        raise ConfigInvalid(["say which runs: their ids, or --since 7d with other filters"])
    selections = [f"--{name}" for name in SELECTIONS if getattr(args, name) is not None]
    if args.run and selections:
        fault = f"{', '.join(selections)}: chooses runs, and their ids are given; leave out one or the other"
        raise ConfigInvalid([f"{fault} (a replay under another tier is --under tier=NAME)"])
    return configuration


def _read_plan(file: str) -> Any:
    try:
        return orjson.loads(Path(file).read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigInvalid([f"--under: {file} cannot be read as JSON: {error}"]) from None


# -- replaying


async def _replay(config: Configuration, args: Arguments, under: Mapping[str, str], now: Callable[[], float]) -> Batch:
    async with storage.existing_database(config.settings):
        config = await _configuration(config, under)
        async with engine.start_engine(config, args.concurrency, dispatches=True) as runtime:
            batch = Batch(runtime, args, under, Money(args.max_usd, args.concurrency))
            rows = await _rows(runtime.context.store, args, now())
            earlier_runs = _open_results(args.out)
            waiting = [row for row in rows if row.id not in earlier_runs]
            batch.left_out[REPLAYED_BEFORE] = len(rows) - len(waiting)
            waiting.reverse()
            with terminal.stderr().status(f"replaying {terminal.count(len(waiting), 'run')}"):
                async with asyncio.TaskGroup() as group:
                    for _ in range(args.concurrency):
                        group.create_task(_replay_until_empty(batch, waiting))
    batch.left_out = +batch.left_out
    return batch


async def _configuration(config: Configuration, under: Mapping[str, str]) -> Configuration:
    """Return the configuration with the pool snapshot that is to be tried, and with arms."""
    catalog = config.catalog
    if "snapshot" in under:
        catalog = await _load_stored_catalog(config, under["snapshot"])
    if "conductor" in under:
        conductors = (*catalog.evaluation.conductors, under["conductor"])
        catalog = seal_catalog(
            replace(catalog, evaluation=replace(catalog.evaluation, arms=True, conductors=conductors))
        )
    return replace(config, catalog=catalog)


async def _load_stored_catalog(config: Configuration, digest: str) -> Catalog:
    async with storage.open_configured_store(config.settings) as store:
        bodies = await store.catalogs([digest])
    if digest not in bodies:
        raise ConfigInvalid([f"--under: no pool with the digest {digest[:12]} is stored; runs name theirs"])
    return restore_catalog(bodies[digest])


async def _rows(store: Store, args: Arguments, now: float) -> list[RunRow]:
    """Return the runs to replay, which have ended and do not follow from others."""
    if args.run:
        return [await storage.find_run(store, name) for name in args.run]
    query = replace(query_of(args, await store.keys(), now), origin_kind="")
    rows: list[RunRow] = []
    max_runs = args.limit
    if args.seed is not None:
        max_runs = MAX_SAMPLED_RUNS
    async for row in storage.every_run(store, query):
        if row.ended_at is not None and row.topology and not row.erased:
            rows.append(row)
        if len(rows) == max_runs:
            break
    if args.seed is not None and len(rows) > args.limit:
        return Random(args.seed).sample(rows, args.limit)
    return rows[: args.limit]


def _open_results(out: str | None) -> set[str]:
    """Return the runs that an earlier command has replayed into this file. A line that was cut off does not count.

    A file that cannot be written, or that is no file of replays, is an error now, before money is spent.
    """
    runs: set[str] = set()
    if out is None:
        return runs
    Path(out).open("ab").close()
    earlier_results = Path(out).read_bytes()
    if earlier_results and not earlier_results.startswith(FIRST_BYTES):
        raise ConfigInvalid([f"--out: {out} has something other than replays in it; name another file, or a new one"])
    for line in earlier_results.splitlines():
        with suppress(orjson.JSONDecodeError, KeyError, TypeError):
            runs.add(str(orjson.loads(line)["run"]))
    return runs


async def _replay_until_empty(batch: Batch, waiting: list[RunRow]) -> None:
    """Replay one run after the other, until none is left."""
    while waiting:
        row = waiting.pop()
        try:
            pair = await _replay_run(batch, row)
        except BatonError as error:
            pair = ReplayedRun(row.id, refusal=error.message)
        except EventMalformed as error:
            pair = ReplayedRun(row.id, refusal=str(error))
        if pair is None:
            batch.left_out["no money left"] += 1
            continue
        batch.pairs.append(pair)
        if batch.args.out is not None:
            _append(Path(batch.args.out), pair)


def _append(path: Path, pair: ReplayedRun) -> None:
    with path.open("ab") as file:
        file.write(orjson.dumps(pair.to_json()) + b"\n")


async def _replay_run(batch: Batch, row: RunRow) -> ReplayedRun | None:
    """Replay one run; None if no money is left for it."""
    store = batch.runtime.context.store
    await content_reads.record_read(store, row.id, row.tenant, "replay")
    earlier = await replays.read_run(store, await store.journal(row.id))
    order = _order(batch, row, earlier)
    if "version" in batch.under:
        await replays.check_version(store, order.tier, batch.under["version"])
    part = batch.money.part(order.limits.usd, row.spent.usd)
    if part is None:
        return None
    cost: int | None = None
    try:
        order = replace(order, followed=True, limits=replace(order.limits, usd=part))
        again = await _await_end_of_replay(batch, order)
        if again.state != "awaiting_approval":  # after which it goes on
            cost = again.spent.usd
    except InvalidRequest:  # it was not admitted
        cost = 0
        raise
    finally:
        batch.money.settle(part, cost)
    journals = await store.journal(row.id), await store.journal(again.id)
    ratings = await store.feedback(row.id), await store.feedback(again.id)
    return ReplayedRun(row.id, again.id, await replay.compare_with_replay(store, journals, ratings, reads=True))


def _order(batch: Batch, row: RunRow, earlier: replays.EarlierRun) -> Order:
    catalog, under = batch.runtime.pool.catalog(), batch.under
    tier, model = _tier(catalog, row, earlier.state.admitted.served_by, under)
    effort = nearest_effort(tier, under.get("effort") or earlier.state.admitted.effort or None)
    plan = None
    if "plan" in under:
        plan = _read_plan(under["plan"])
    anew = any(name in under for name in ("tier", "version", "conductor"))
    changes = Changes(
        plan,
        under.get("worker"),
        batch.args.from_step,
        conducts=anew and plan is None and "worker" not in under,
        version=under.get("version", ""),
    )
    new_order = Order(
        task=earlier.task,
        tier=tier,
        model=model,
        effort=effort,
        limits=tier.efforts[effort],
        tenant=row.tenant,
        key=REPLAY_KEY,
        labels=frozenset(batch.args.add_label),
        explore=False,
        capped=batch.args.max_usd is not None,
    )
    return replays.as_replay(new_order, earlier, changes, catalog)


def _tier(catalog: Catalog, row: RunRow, served_by: str, under: Mapping[str, str]) -> tuple[Tier, str]:
    model = under.get("tier") or row.model
    tier = tier_of(catalog, row.tier, row.model, served_by)
    if "tier" in under:
        tier = tier_for(catalog, under["tier"])
    if tier is not None and "conductor" in under:
        model = f"{tier.name}:conductor:{under['conductor']}"
        tier = tier_for(catalog, model)
    if tier is None:
        raise ConfigInvalid([f"there is no tier {under.get('tier', row.tier)} with that conductor in the pool file"])
    return tier, model


async def _await_end_of_replay(batch: Batch, order: Order) -> RunRow:
    """Return the row of a replay that has ended, or that waits: for an approval, or for tools without recorded results
    for its calls."""
    store = batch.runtime.context.store
    end = await engine.run_to_end(batch.runtime, order)
    row = await store.run(end.state.run)
    waits = 0.0
    while row.ended_at is None and waits < WAIT_SECONDS:
        await asyncio.sleep(POLL_SECONDS)
        if row.state in WAITING:
            waits += POLL_SECONDS
        else:
            waits = 0.0
        row = await store.run(row.id)
    return row


# -- comparing


def _compare_two(args: Arguments, environ: Mapping[str, str]) -> int:
    settings = read(environ)
    storage.print_database(settings)
    comparison = event_loop.run(_compare_runs(settings, args))
    if args.json:
        terminal.print_json(comparison.to_json())
    else:
        _print_two(comparison)
    return 0


async def _compare_runs(settings: Any, args: Arguments) -> Comparison:
    async with storage.open_configured_store(settings) as store:
        rows = [await storage.find_run(store, name) for name in (args.run, args.other)]
        for row in rows:
            await content_reads.record_read(store, row.id, row.tenant, "comparison")
        journals = await store.journal(rows[0].id), await store.journal(rows[1].id)
        ratings = await store.feedback(rows[0].id), await store.feedback(rows[1].id)
        return await replay.compare_with_replay(store, journals, ratings, reads=True)


def _intervals(batch: Batch, seed: int) -> list[tuple[PairedDifference, Interval | None]]:
    """Return the paired differences with their 95 % intervals by the bootstrap over runs; None for a single pair. What
    a replay that waits will have come to is not known."""
    comparisons = [pair.comparison for pair in batch.pairs if pair.comparison is not None]
    intervals: list[tuple[PairedDifference, Interval | None]] = []
    for metric in pair_differences([pair for pair in comparisons if pair.second.state not in WAITING]):
        spread = None
        if metric.pairs > 1:
            means = paired_bootstrap({"difference": metric.differences}, Random(seed), RESAMPLES)
            spread = interval([mean["difference"] for mean in means])
        intervals.append((metric, spread))
    return intervals


def _metric(metric: PairedDifference, spread: Interval | None) -> dict[str, Any]:
    ends = None
    if spread is not None:
        ends = [in_unit(metric.metric, spread.low), in_unit(metric.metric, spread.high)]
    return metric.to_json() | {"interval_95": ends}


# -- printing


def _print(batch: Batch, differences: Sequence[tuple[PairedDifference, Interval | None]]) -> None:
    console = terminal.stdout()
    table = terminal.table()
    for column in ("run", "replay", "state", "answer", "cost", "time", "disclosures"):
        table.add_column(column, no_wrap=True)
    for pair in batch.pairs:
        table.add_row(*_cells(pair))
    terminal.print_table(table, "No run was replayed.")
    for pair in batch.pairs:
        if pair.refusal:
            console.print(f"{pair.run}: {pair.refusal}", soft_wrap=True)
    for reason, count in batch.left_out.most_common():
        console.print(f"left out: {count:,}, {reason}")
    if len(batch.pairs) > 1:
        console.print(_differences(differences))


def _cells(pair: ReplayedRun) -> tuple[str, ...]:
    comparison = pair.comparison
    if comparison is None:
        return pair.run, "refused", "", "", "", "", ""
    first, second = comparison.first, comparison.second
    return (
        pair.run,
        pair.replay,
        second.state,
        SAME_ANSWER[comparison.same_answer],
        f"{terminal.dollars(first.usd)} -> {terminal.dollars(second.usd)}",
        f"{terminal.duration(first.seconds)} -> {terminal.duration(second.seconds)}",
        f"{len(comparison.only_first)} fewer, {len(comparison.only_second)} more",
    )


def _differences(differences: Sequence[tuple[PairedDifference, Interval | None]]) -> Table:
    table = terminal.table()
    table.add_column("per run", no_wrap=True)
    for column in ("pairs", "run", "replay", "difference", "95 % interval", "lower", "higher"):
        table.add_column(column, justify="right", no_wrap=True)
    for metric, spread in differences:
        record = _metric(metric, spread)
        ends = record["interval_95"]
        interval_text = ""
        if ends is not None:
            interval_text = f"{ends[0]:+g} to {ends[1]:+g}"
        table.add_row(
            str(record["metric"]),
            f"{metric.pairs:,}",
            f"{record['first']:g}",
            f"{record['second']:g}",
            f"{record['difference']:+g}",
            interval_text,
            f"{metric.lower:,}",
            f"{metric.higher:,}",
        )
    return table


def _print_two(comparison: Comparison) -> None:
    console, record = terminal.stdout(), comparison.to_json()
    console.print(f"first: {comparison.first.run}\nsecond: {comparison.second.run}", soft_wrap=True)
    table = terminal.table("", "first", "second")
    for name in record["first"]:
        if name != "run":
            cells = [terminal.plain(record[run][name]) for run in ("first", "second")]
            terminal.add_row(table, (name.replace("_", " "), *cells))
    console.print(table)
    console.print(SAME_ANSWER_SENTENCES[comparison.same_answer])
    for step in comparison.steps:
        console.print(_step(step.to_json()), soft_wrap=True)
    for disclosure in comparison.only_first:
        console.print(f"Only the first run: {_disclosure(disclosure)}", soft_wrap=True)
    for disclosure in comparison.only_second:
        console.print(f"Only the second run: {_disclosure(disclosure)}", soft_wrap=True)


def _disclosure(disclosure: Recipient) -> str:
    """Return who saw what, in a sentence."""
    content = ", ".join(disclosure.saw) or "its subtask alone"
    recipient = f"{disclosure.recipient} ({disclosure.role})"
    if disclosure.place:
        recipient += f" in step {disclosure.place}"
    return f"{recipient} saw {content}."


def _step(record: Mapping[str, Any]) -> str:
    first, second = record["first"], record["second"]
    if second is None:
        return f"step {record['step']}: only in the first run, by {first['worker']}"
    if first is None:
        return f"step {record['step']}: only in the second run, by {second['worker']}"
    return (
        f"step {record['step']}: {first['worker']} -> {second['worker']}, {SAME_OUTPUT[record['same_output']]}, "
        f"{first['cost_usd']:g} -> {second['cost_usd']:g} dollars"
    )
