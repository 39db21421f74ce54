"""`baton runs prune` deletes runs that ended long ago, journal and all, and archives them first where there is one."""

from collections.abc import Callable, Mapping
from secrets import token_hex

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.engine.retention import Pruner, PruneResult, archiving, prune_query
from app.process.config import Settings, read
from app.store.protocol import PruneQuery


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command on the configured database. Returns the exit status: 1 if a journal is damaged."""
    settings = read(environ)
    terminal.log_to_stderr("warning")
    storage.print_database(settings)
    query = prune_query(now(), args.before, settings.idempotency_hours * 3600)
    if args.dry_run:
        runs, events = event_loop.run(_count(settings, query))
        if args.json:
            terminal.print_json({"runs": runs, "events": events, "pruned": False})
        else:
            terminal.stdout().print(f"{_count_text(runs, events)} would be pruned.")
        return 0
    result = event_loop.run(_prune(settings, query, now))
    if args.json:
        record = {"runs": result.runs, "events": result.events, "pruned": True}
        terminal.print_json({**record, "files": list(result.files), "damaged": list(result.damaged)})
    else:
        _report(settings, result)
    return int(bool(result.damaged))


async def _count(settings: Settings, query: PruneQuery) -> tuple[int, int]:
    async with storage.open_configured_store(settings) as store:
        return await store.count_prunable(query)


async def _prune(settings: Settings, query: PruneQuery, now: Callable[[], float]) -> PruneResult:
    async def rest() -> bool:
        return True

    archive = archiving(settings.archive, settings.archive_endpoint, contents=settings.archive_content)
    async with storage.open_configured_store(settings) as store, storage.open_journals(settings) as journals:
        result = await Pruner(store, journals, archive, now=now, name=_name, pause=rest).prune(query)
        await store.overwrite_erased()
    return result


def _count_text(runs: int, events: int) -> str:
    return f"{terminal.count(runs, 'run')} with {terminal.count(events, 'event')}"


def _name(prefix: str) -> str:
    return f"{prefix}_{token_hex(8)}"


def _report(settings: Settings, result: PruneResult) -> None:
    console = terminal.stdout()
    console.print(f"Pruned: {_count_text(result.runs, result.events)}.")
    if result.held:
        held_runs = terminal.count(len(result.held), "run")
        console.print(f"Kept, because a legal hold covers them: {held_runs}; see `baton holds ls`.")
    if settings.archive:
        files = terminal.count(len(result.files), "file")
        console.print(f"The journals are in {files}:", *result.files, sep="\n", soft_wrap=True)
    for name in result.damaged:
        console.print(f"{name} was kept: its journal is damaged. `baton audit check --run {name}` shows how.")
