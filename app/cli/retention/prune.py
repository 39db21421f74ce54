"""`baton runs prune` deletes runs that ended long ago, journal and all, and archives them first where there is one."""

from collections.abc import Callable, Mapping
from secrets import token_hex

from msgspec import Struct
from msgspec.structs import replace

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.engine.retention import Pruner, PruneResult, archiving, prune_query
from app.process.config import Settings
from app.store.archive import Archive
from app.store.protocol import PruneQuery


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command on the configured database. Returns the exit status: 1 if a journal is damaged."""
    settings = storage.read_settings(environ)
    query = prune_query(now(), args.before, settings.idempotency_hours * 3600)
    if args.dry_run:
        runs, events, kept = event_loop.run(_count(settings, query))
        if args.json:
            counts = {"runs": runs, "events": events, "pruned": False}
            terminal.print_json({**counts, "held": kept.held, "unsealed": kept.unsealed})
        else:
            terminal.stdout().print(f"{_count_text(runs, events)} would be pruned.")
            _print_kept(kept)
        return 0
    result, kept = event_loop.run(_prune(settings, query, now))
    if args.json:
        counts = {"runs": result.runs, "events": result.events, "pruned": True}
        counts |= {"held": kept.held, "unsealed": kept.unsealed}
        terminal.print_json({**counts, "files": list(result.files), "damaged": list(result.damaged)})
    else:
        _report(settings, result, kept)
    return int(bool(result.damaged))


class _Kept(Struct, frozen=True):
    """The number of runs whose time is over and that are kept: by legal holds, and until their events are sealed."""

    held: int
    unsealed: int


async def _count(settings: Settings, query: PruneQuery) -> tuple[int, int, _Kept]:
    """Return the number of runs that would be pruned, of their events, and of the runs that are kept."""
    async with storage.existing_database(settings), storage.open_journals(settings) as journals:
        return *await journals.count_prunable(query), await _count_kept(journals, query)


async def _count_kept(journals: Archive, query: PruneQuery) -> _Kept:
    held = 0
    for is_unsealed in (False, True):
        runs, _ = await journals.count_prunable(replace(query, on_hold=True, unsealed=is_unsealed))
        held += runs
    unsealed, _ = await journals.count_prunable(replace(query, unsealed=True))
    return _Kept(held, unsealed)


async def _prune(settings: Settings, query: PruneQuery, now: Callable[[], float]) -> tuple[PruneResult, _Kept]:
    """Prune, and return with the result the number of runs that are kept."""

    async def rest() -> bool:
        return True

    archive = archiving(settings.archive, settings.archive_endpoint, contents=settings.archive_content)
    async with storage.open_configured_store(settings) as store, storage.open_journals(settings) as journals:
        pruner = Pruner(store, journals, archive, now=now, name=_name, pause=rest, by=storage.operator())
        result = await pruner.prune(query)
        await store.overwrite_erased()
        kept = await _count_kept(journals, query)
    return result, replace(kept, held=kept.held + len(result.held))


def _count_text(runs: int, events: int) -> str:
    return f"{terminal.count(runs, 'run')} with {terminal.count(events, 'event')}"


def _name(prefix: str) -> str:
    return f"{prefix}_{token_hex(8)}"


def _print_kept(kept: _Kept) -> None:
    console = terminal.stdout()
    if kept.held:
        held_runs = terminal.count(kept.held, "run")
        console.print(f"Kept, because a legal hold covers them: {held_runs}; see `baton holds ls`.")
    if kept.unsealed:
        unsealed_runs = terminal.count(kept.unsealed, "run")
        console.print(
            f"Kept, until all of their events are sealed: {unsealed_runs}. Engines seal them; see `baton audit log`."
        )


def _report(settings: Settings, result: PruneResult, kept: _Kept) -> None:
    console = terminal.stdout()
    console.print(f"Pruned: {_count_text(result.runs, result.events)}.")
    _print_kept(kept)
    if settings.archive:
        files = terminal.count(len(result.files), "file")
        console.print(f"The journals are in {files}:", *result.files, sep="\n", soft_wrap=True)
    for name in result.damaged:
        console.print(f"{name} was kept: its journal is damaged. `baton audit check --run {name}` shows how.")
