"""`baton holds add|ls|release` manages legal holds."""

from collections.abc import Callable, Mapping
from secrets import token_hex

from msgspec.structs import asdict

from app.cli import event_loop, storage, terminal
from app.cli.administration.keys import find_key
from app.cli.arguments import Arguments
from app.errors import ConfigInvalid, NotFound
from app.process.config import Settings
from app.store.protocol import Hold, HoldScope, RunQuery, Store

COLUMNS = ("id", "covers", "reason", "placed", "by", "released", "by")


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs on the configured database."""
    settings = storage.read_settings(environ)
    verbs = {"add": _add, "ls": _list, "release": _release}
    holds = event_loop.run(verbs[args.verb](settings, args, now()))
    if args.json:
        terminal.print_json([asdict(hold) for hold in holds])
        return 0
    table = terminal.table(*COLUMNS)
    for hold in holds:
        terminal.add_row(table, _cells(hold))
    terminal.print_table(table, "No legal hold is in force.")
    return 0


async def _add(settings: Settings, args: Arguments, now: float) -> list[Hold]:
    async with storage.open_configured_store(settings) as store:
        scope, name = await _choose_scope(store, args, now)
        by = storage.operator()
        tenant = ""
        if scope == "user":
            tenant = args.tenant or ""
        hold = Hold(
            id=f"hold_{token_hex(8)}",
            scope=scope,
            name=name,
            tenant=tenant,
            reason=args.reason,
            placed_at=now,
            placed_by=by.id,
        )
        placed_hold = await store.place_hold(hold, by=by)
        if scope == "user" and not await store.runs(RunQuery(tenant=tenant or None, user=name, limit=1)):
            words = f"note: `baton runs ls --user` finds no run of {name} so far; is it written as in requests?"
            terminal.stderr().print(words, soft_wrap=True)
        return [placed_hold]


async def _choose_scope(store: Store, args: Arguments, now: float) -> tuple[HoldScope, str]:
    """Return the scope and the name that the command names. Raises `ConfigInvalid` unless it names one."""
    options: list[tuple[HoldScope, str | None]] = [("run", args.run), ("user", args.user), ("key", args.key)]
    if args.user is None:
        options.append(("tenant", args.tenant))
    scopes = [(scope, name) for scope, name in options if name]
    if len(scopes) != 1:
        raise ConfigInvalid(["holds add: name one of --run, --user, --tenant and --key"])
    scope, name = scopes[0]
    if scope == "run":
        return scope, (await storage.find_run(store, name)).id
    if scope == "key":
        return scope, find_key(await store.keys(), name, now).id
    return scope, name


async def _list(settings: Settings, args: Arguments, _now: float) -> list[Hold]:
    async with storage.open_configured_store(settings) as store:
        return [hold for hold in await store.holds() if args.every or hold.released_at is None]


async def _release(settings: Settings, args: Arguments, now: float) -> list[Hold]:
    async with storage.open_configured_store(settings) as store:
        try:
            return [await store.release_hold(args.hold, now, by=storage.operator())]
        except NotFound:
            raise NotFound("There is no legal hold of this id; `baton holds ls` lists them.") from None


def _cells(hold: Hold) -> tuple[str, ...]:
    where = ""
    if hold.tenant and hold.scope != "tenant":
        where = f" of {hold.tenant}"
    release_text = "-"
    if hold.released_at is not None:
        release_text = terminal.minute(hold.released_at)
    placement_text = terminal.minute(hold.placed_at)
    covers = f"{hold.scope} {hold.name}{where}"
    return hold.id, covers, hold.reason, placement_text, hold.placed_by, release_text, hold.released_by or "-"
