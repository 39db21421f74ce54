"""`baton restored` puts a database that was restored from a back-up into service, and lists what it lacks.

What ran after the restore point is not in the journal any more. The evidence that is left are the logs of the engines
(`A step has ended.`) and the accounts of the providers. A call of the planning has no line in the logs.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec
from msgspec import Struct

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.terminal import count, moment
from app.core.pool.catalog import MILLION
from app.core.run.fold import fold
from app.core.run.state import RunState
from app.engine.runs.recovery import end_restored
from app.errors import ConfigInvalid, EventMalformed, NotFound, QueueUnavailable
from app.process.config import Settings
from app.store.protocol import RunQuery, RunRow, Store
from app.store.sqlkit import revisions

STEP_LINE = "A step has ended."
CLEAR = "app.stepqueue.redis:clear"
LATEST_RUNS = 200
"""The newest runs, in whose journals the latest event is looked for."""
MAX_STEP_USD = 1_000_000
"""The most dollars of a step in a log; a line with more was not written by an engine."""
MAX_PRINTED_LINES = 50
"""Lines of each list that are printed; `--json` has all of them."""


class OpenCall(Struct, frozen=True):
    """A call without an outcome. It may have been billed, with `usd` dollars at the most."""

    call: str
    worker: str
    usd: float


class OpenRun(Struct, frozen=True):
    """A run that was open at the restore point; `spent` are the dollars that its journal knows of."""

    run: str
    tenant: str
    state: str
    spent: float
    calls: tuple[OpenCall, ...]


class MissingStep(Struct, frozen=True):
    """A step that is in a log and cost `usd` dollars more than the journal knows of."""

    run: str
    step: int
    worker: str
    tenant: str
    usd: float
    known: bool
    """False if the journal does not have the run at all, or cannot be read."""


class RestoredState(Struct, frozen=True):
    """The result. `ends` is the time of the journal's last event, `keys` are the keys deleted in Redis, and None where
    Redis is not used or does not answer. `unreadable` are open runs whose journal cannot be read: no engine goes on
    with them, and one ends them at their deadline."""

    ends: float | None
    open: tuple[OpenRun, ...]
    unreadable: tuple[str, ...]
    missing: tuple[MissingStep, ...]
    logged: int
    keys: int | None


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command. Raises `ConfigInvalid` if other processes of Baton use the database."""
    settings = storage.read_settings(environ)
    with storage.name_database_in_failures(settings):
        others = revisions.count_connections(settings.database_url)
    if others and not args.dry_run:
        raise ConfigInvalid(
            [
                f"gateways or engines have {count(others, 'connection')}; stop them, and repeat this command. A "
                "PgBouncer that pools transactions keeps those of processes that have ended: name the server itself in "
                "BATON_DATABASE_URL, and issue `RECONNECT` in PgBouncer's console"
            ]
        )
    lines = list(_step_lines(args.logs))
    state = event_loop.run(_carry_out(settings, args, lines, now()))
    if args.json:
        terminal.print_json(msgspec.to_builtins(state))
    else:
        _print(state, args)
    return 0


async def _carry_out(
    settings: Settings, args: Arguments, lines: Sequence[Mapping[str, Any]], now: float
) -> RestoredState:
    async with storage.open_configured_store(settings) as store:
        if args.dry_run:
            ends = await _last_event(store)
        else:
            ends = await store.begin_generation(now)
        states: dict[str, RunState] = {}
        readable, unreadable = list[RunRow](), list[str]()
        for row in await storage.open_runs(store):
            try:
                states[row.id] = fold((await store.journal(row.id)).events)
                readable.append(row)
            except EventMalformed:
                unreadable.append(row.id)
        missing = await _missing(store, lines)
        if not (args.dry_run or args.keep_open):
            for row in readable:
                await end_restored(store, row, now)
    keys = None
    if not args.dry_run:
        keys = await _clear_queue(settings)
    open_runs = tuple([_open_run(row, states[row.id]) for row in readable])
    return RestoredState(ends, open_runs, tuple(unreadable), missing, len(lines), keys)


async def _last_event(store: Store) -> float | None:
    """Return the time of the latest event of the newest runs, without writing."""
    latest: float | None = None
    for row in await store.runs(RunQuery(limit=LATEST_RUNS)):
        with suppress(EventMalformed):
            at = (await store.journal(row.id)).events[-1].at
            latest = at if latest is None else max(at, latest)
    return latest


def _open_run(row: RunRow, state: RunState) -> OpenRun:
    calls = [OpenCall(call.id, call.worker, call.usd_held / MILLION) for call in state.open_calls]
    return OpenRun(row.id, row.tenant, row.state, row.spent.usd / MILLION, tuple(calls))


# -- what the logs tell


def _step_lines(files: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of steps in these logs. Raises `ConfigInvalid` for a file that cannot be read."""
    for file in files:
        try:
            text = Path(file).read_text(errors="replace")
        except OSError as error:
            raise ConfigInvalid([f"--log {file}: cannot be read: {error.strerror}"]) from None
        for line in text.splitlines():
            if STEP_LINE not in line:
                continue
            fields = _fields(line)
            if fields:
                yield fields


def _fields(line: str) -> Mapping[str, Any]:
    """Return the fields of a line, which may have a prefix of the log's collector; empty if it is none of a step."""
    try:
        fields = json.loads(line[line.index("{") :])
    except ValueError:
        return {}
    if not isinstance(fields, dict):
        return {}
    if not isinstance(fields.get("run"), str) or not isinstance(fields.get("step"), int):
        return {}
    return fields


async def _missing(store: Store, lines: Sequence[Mapping[str, Any]]) -> tuple[MissingStep, ...]:
    """Return the steps that cost more, by the logs, than the journal knows of."""
    costs = sum_logged_costs(lines)
    last = {(fields["run"], fields["step"]): fields for fields in lines}
    missing_steps = []
    journals: dict[str, RunState | None] = {}
    for run, step in sorted(costs):
        if run not in journals:
            journals[run] = await _state(store, run)
        state, fields = journals[run], last[run, step]
        surplus = costs[run, step] - _sum_journaled_cost(state, step)
        is_settled = state is not None and step in state.steps and state.steps[step].settled
        if surplus > 0 or not is_settled:
            worker, tenant = str(fields.get("worker", "")), str(fields.get("tenant", ""))
            usd = max(surplus, 0) / MILLION
            missing_steps.append(MissingStep(run, step, worker, tenant, usd, known=state is not None))
    return tuple(missing_steps)


def sum_logged_costs(lines: Sequence[Mapping[str, Any]]) -> Mapping[tuple[str, int], int]:
    """Return the micro-dollars of each step by these lines, by run and step; a step has one line for each of its turns.

    They are whole numbers, as in the journal: sums of dollars differ in their last digit from what the journal has.
    """
    costs: Counter[tuple[str, int]] = Counter()
    for fields in lines:
        cost = fields.get("cost_usd")
        if not isinstance(cost, int | float) or not 0 <= cost <= MAX_STEP_USD:
            cost = 0
        costs[fields["run"], fields["step"]] += round(cost * MILLION)
    return costs


async def _state(store: Store, run: str) -> RunState | None:
    try:
        return fold((await store.journal(run)).events)
    except (NotFound, EventMalformed):
        return None


def _sum_journaled_cost(state: RunState | None, step: int) -> int:
    """Return the micro-dollars that the journal knows of for a step: open calls with what is held for them."""
    if state is None:
        return 0
    micro_usd = 0
    for call in state.calls.values():
        if call.step != step:
            continue
        if call.outcome is None:
            micro_usd += call.usd_held
        else:
            micro_usd += call.usd
    return micro_usd


async def _clear_queue(settings: Settings) -> int | None:
    if settings.redis_url is None:
        return None
    try:
        key_count: int = await resolve_name(CLEAR)(settings.redis_url)
    except QueueUnavailable:
        terminal.stderr().print("Redis does not answer; its tickets stay, and are ignored where they fit no row.")
        return None
    return key_count


# -- words


def _print(state: RestoredState, args: Arguments) -> None:
    since = "nothing"
    if state.ends:
        since = moment(state.ends)
    print(f"The journal ends at {since}.")
    outcome = "ended as failed (restored)"
    if args.keep_open:
        outcome = "left to the engines"
    if args.dry_run:
        outcome = f"would be {outcome}"
    calls = list(chain.from_iterable([run.calls for run in state.open]))
    bound = sum([call.usd for call in calls])
    runs = count(len(state.open), "open run")
    print(f"{runs} {outcome}, with {count(len(calls), 'open call')} of at most ${bound:.6f}.")
    _list([f"{run.run}  {run.state}  spent ${run.spent:.6f}  {_calls(run)}" for run in state.open])
    if state.unreadable:
        runs = count(len(state.unreadable), "open run")
        print(f"{runs} cannot be read (`baton audit check` says more); engines end them at their deadline.")
        _list(state.unreadable)
    usd = sum([step.usd for step in state.missing])
    print(f"{count(len(state.missing), 'step')} of {state.logged} in the logs missing from the journal: ${usd:.6f}.")
    missing = []
    for step in state.missing:
        missing.append(f"{step.run}  step {step.step}  {step.worker}  ${step.usd:.6f}  {_describe_known(step)}")
    _list(missing)
    if state.keys is not None:
        print(f"{count(state.keys, 'key')} of the queue deleted in Redis.")
    print(f"What no log tells: compare the accounts of the providers since {since}.")
    print("Legal holds that were placed since then are gone: place them again before any engine starts.")
    print("Keys that were revoked and contents that were erased since then are back: revoke and erase them again.")


def _list(lines: Sequence[str]) -> None:
    for line in lines[:MAX_PRINTED_LINES]:
        print(f"  {terminal.clean(line)}")
    if len(lines) > MAX_PRINTED_LINES:
        print(f"  and {len(lines) - MAX_PRINTED_LINES} more; --json lists all")


def _calls(run: OpenRun) -> str:
    return ", ".join([f"{call.worker} at most ${call.usd:.6f}" for call in run.calls]) or "no open call"


def _describe_known(step: MissingStep) -> str:
    if step.known:
        return "the run is known"
    return "the run is missing, or cannot be read"
