"""`baton runs erase` erases the content of runs: of one, of an end user, of a tenant, or of all before some time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.engine.retention import EraseResult, erase_all, runs_with_content, runs_with_text, texts_with_ref
from app.engine.runs import cancellation
from app.errors import ConfigInvalid, LegalHold
from app.gateway.runs import cancel
from app.process.config import Settings, read
from app.store.protocol import ContentQuery, RunRow, Store
from app.store.protocol.journal import ErasedBy

END_SECONDS = 4.0
"""Seconds that open runs have to end, in addition to a lease."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command on the configured database."""
    settings = read(environ)
    terminal.log_to_stderr("warning")
    if not any((args.run, args.user, args.tenant, args.before, args.ref)):
        raise ConfigInvalid(["runs erase: say what to erase, with --run, --ref, --user, --tenant or --before"])
    for name in ("run", "ref"):
        others = {"run", "ref", "user", "tenant", "before"} - {name}
        if getattr(args, name) and any(getattr(args, other) for other in others):
            raise ConfigInvalid([f"runs erase: --{name} says what to erase; leave the other options out"])
    storage.print_database(settings)
    return event_loop.run(_erase(settings, args, now))


async def _erase(settings: Settings, args: Arguments, now: Callable[[], float]) -> int:
    """Erase, and return the exit status: 1 if something was left because a legal hold covers it."""
    before = None
    if args.before:
        before = now() - args.before
    query = ContentQuery(tenant=args.tenant, user=args.user, before=before)
    async with storage.open_configured_store(settings) as store:
        if args.dry_run:
            run_count, held = await _count_runs(store, args, query)
            if args.json:
                terminal.print_json({"runs": run_count, "erased": False} | _held_field(held))
            else:
                text = f"The content of {terminal.count(run_count, 'run')} would be erased."
                terminal.stdout().print(f"{text}{_held_text(held)}", soft_wrap=True)
            return 0
        patience = END_SECONDS + settings.lease_seconds
        if args.run:
            result = await _erase_one(store, args.run, patience, now)
        elif args.ref:
            result = await _erase_text(store, args.ref, patience, now)
        else:
            result = await _erase_all(store, query, patience, now)
    if args.json:
        record: dict[str, object] = {"runs": result.runs, "erased": True, "overwritten": result.overwritten}
        terminal.print_json(record | _held_field(result.held))
    else:
        terminal.stdout().print(_report(settings, result), soft_wrap=True)
    return int(bool(result.held))


async def _count_runs(store: Store, args: Arguments, query: ContentQuery) -> tuple[int, Mapping[str, str]]:
    """Return the number of runs whose content would be erased, and those that legal holds keep, each with the hold."""
    pages: AsyncIterator[Sequence[RunRow]]
    if args.run:
        pages = _with_copies(store, await _find_unheld(store, args.run))
    elif args.ref:
        pages = _with_texts(store, await texts_with_ref(store, store, args.ref))
    else:
        pages = runs_with_content(store, query)
    run_count = 0
    held: dict[str, str] = {}
    async for rows in pages:
        names = [row.id for row in rows if not row.erased]
        held_now = await store.find_holds_by_run(names)
        run_count += len(names) - len(held_now)
        held |= held_now
    return run_count, held


async def _erase_text(store: Store, ref: str, patience: float, now: Callable[[], float]) -> EraseResult:
    """Erase the content of every run that has the text of this ref. The salt of a run goes with its content: as long as
    it stays, a text can be guessed back from its hash."""
    texts = await texts_with_ref(store, store, ref)
    end = partial(_end, store, patience=patience, now=now)
    return await erase_all(store, lambda: _with_texts(store, texts), end, by=storage.operator())


async def _with_texts(store: Store, texts: Sequence[tuple[str, bytes]]) -> AsyncIterator[Sequence[RunRow]]:
    for tenant, text in texts:
        async for rows in runs_with_text(store, tenant, text):
            yield rows


async def _erase_all(store: Store, query: ContentQuery, patience: float, now: Callable[[], float]) -> EraseResult:
    """Erase what the query selects. Of a whole tenant, the keys under which its contents are encrypted are destroyed,
    too: first they are taken out of use, so that no process writes under them any more."""
    cause: ErasedBy = "operator"
    if query.user is not None:
        cause = "user"
    tenant = query.tenant
    if tenant is not None and query == ContentQuery(tenant=tenant):
        cause = "tenant"
        await asyncio.sleep(await store.retire_content_keys(tenant, now()))
    find, end = partial(runs_with_content, store, query), partial(_end, store, patience=patience, now=now)
    result = await erase_all(store, find, end, cause, by=storage.operator())
    if tenant is not None and cause == "tenant":
        await _destroy_keys(store, tenant)
    return result


async def _destroy_keys(store: Store, tenant: str) -> None:
    """Destroy a tenant's content keys, unless a legal hold needs them."""
    try:
        await store.destroy_content_keys(tenant)
    except LegalHold as error:
        terminal.stderr().print(f"The tenant's content keys are kept: {error.message}", soft_wrap=True)


async def _erase_one(store: Store, name: str, patience: float, now: Callable[[], float]) -> EraseResult:
    row = await _find_unheld(store, name)
    find, end = partial(_with_copies, store, row), partial(_end, store, patience=patience, now=now)
    return await erase_all(store, find, end, by=storage.operator())


async def _find_unheld(store: Store, name: str) -> RunRow:
    """Return the run of this name. Raises `LegalHold` if it may not be erased."""
    row = await storage.find_run(store, name)
    if hold := (await store.find_holds_by_run([row.id])).get(row.id):
        raise LegalHold(f"The legal hold {hold} covers the run, so it is not erased; `baton holds ls` shows it.")
    return row


async def _with_copies(store: Store, row: RunRow) -> AsyncIterator[Sequence[RunRow]]:
    yield [row, *await cancel.copies(store.of_tenant(None), row.id)]


async def _end(store: Store, rows: Sequence[RunRow], *, patience: float, now: Callable[[], float]) -> None:
    """Ask runs to end in the operator's name, and wait for that together."""
    for row in rows:
        await cancellation.ask(store, None, row, "operator", now())
    await asyncio.gather(*[cancel.wait_until_ended(store, row, patience) for row in rows])


def _held_field(held: Mapping[str, str]) -> dict[str, object]:
    """Return the JSON field with the runs that legal holds keep, each with the hold; empty if there are none."""
    if not held:
        return {}
    return {"held": dict(held)}


def _held_text(held: Mapping[str, str]) -> str:
    """Return the sentence about runs that legal holds keep, behind a blank; empty if there are none."""
    if not held:
        return ""
    names = ", ".join(sorted(set(held.values())))
    return f" Legal holds ({names}) keep {terminal.count(len(held), 'other run')} whole."


def _report(settings: Settings, result: EraseResult) -> str:
    text = f"The content of {terminal.count(result.runs, 'run')} is erased; every journal remains."
    return f"{text} {_remains_text(settings, result)}{_held_text(result.held)}"


def _remains_text(settings: Settings, result: EraseResult) -> str:
    """Return the sentences about the bytes of what was erased."""
    if result.overwritten:
        return "Nothing of it is left in the database's files."
    if settings.database_url.startswith("sqlite"):
        return (
            "Parts of it may be left in the database's files: a reader was in the way, or the file is too "
            "large to be written anew now. Run VACUUM on it while Baton is stopped."
        )
    return (
        "Its bytes remain in Postgres's files and statistics until VACUUM (FULL, ANALYZE), in its write-ahead "
        "log and in back-ups."
    )
