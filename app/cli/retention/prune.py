"""`baton runs prune` deletes runs that ended long ago, journal and all, and archives them first where there is one."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from secrets import token_hex

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.engine.retention import Pruner, PruneResult, archiving, prune_query
from app.process.config import Settings, read
from app.store.protocol import PruneQuery, Store


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command on the configured database. Returns the exit status: 1 if a journal is damaged."""
    settings = read(environ)
    terminal.log_to_stderr("warning")
    storage.print_database(settings)
    query = prune_query(now(), args.before, settings.idempotency_hours * 3600)
    if args.dry_run:
        runs, events, held = event_loop.run(_count(settings, query))
        if args.json:
            terminal.print_json({"runs": runs, "events": events, "pruned": False, "held": held})
        else:
            terminal.stdout().print(f"{_count_text(runs, events)} would be pruned.")
            _print_held(held)
        return 0
    result, held = event_loop.run(_prune(settings, query, now))
    if args.json:
        record = {"runs": result.runs, "events": result.events, "pruned": True, "held": held}
        terminal.print_json({**record, "files": list(result.files), "damaged": list(result.damaged)})
    else:
        _report(settings, result, held)
    return int(bool(result.damaged))


async def _count(settings: Settings, query: PruneQuery) -> tuple[int, int, int]:
    """Return the number of runs that would be pruned, of their events, and of the runs that legal holds keep."""
    async with storage.open_configured_store(settings) as store:
        return *await store.count_prunable(query), await _count_held(store, query)


async def _count_held(store: Store, query: PruneQuery) -> int:
    runs, _ = await store.count_prunable(replace(query, on_hold=True))
    return runs


async def _prune(settings: Settings, query: PruneQuery, now: Callable[[], float]) -> tuple[PruneResult, int]:
    """Prune, and return with the result the number of runs that legal holds keep."""

    async def rest() -> bool:
        return True

    archive = archiving(settings.archive, settings.archive_endpoint, contents=settings.archive_content)
    async with storage.open_configured_store(settings) as store, storage.open_journals(settings) as journals:
        result = await Pruner(store, journals, archive, now=now, name=_name, pause=rest).prune(query)
        await store.overwrite_erased()
        held = await _count_held(store, query) + len(result.held)
    return result, held


def _count_text(runs: int, events: int) -> str:
    return f"{terminal.count(runs, 'run')} with {terminal.count(events, 'event')}"


def _name(prefix: str) -> str:
    return f"{prefix}_{token_hex(8)}"


def _print_held(held: int) -> None:
    if held:
        held_runs = terminal.count(held, "run")
        terminal.stdout().print(f"Kept, because a legal hold covers them: {held_runs}; see `baton holds ls`.")


def _report(settings: Settings, result: PruneResult, held: int) -> None:
    console = terminal.stdout()
    console.print(f"Pruned: {_count_text(result.runs, result.events)}.")
    _print_held(held)
    if settings.archive:
        files = terminal.count(len(result.files), "file")
        console.print(f"The journals are in {files}:", *result.files, sep="\n", soft_wrap=True)
    for name in result.damaged:
        console.print(f"{name} was kept: its journal is damaged. `baton audit check --run {name}` shows how.")
