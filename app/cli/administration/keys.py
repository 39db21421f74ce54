"""`baton keys add|ls|show|rotate|revoke` manages the API keys of callers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.core.roles import ROLES, role_of, scopes_of
from app.errors import ConfigInvalid, NotFound
from app.gateway.http.api_keys import is_in_force, key_to_json, mint, new_secret, pepper_mark
from app.process.config import Configuration, Settings, configure, pepper_note, peppers
from app.store.protocol import KeyRow, Store

PEPPER_NOTES: Mapping[str, str] = {
    "current": "",
    "unknown": "",
    "earlier": ", hashed under an earlier pepper",
    "missing": ", void: hashed under a pepper that this command does not have",
}
"""The words of `baton keys ls` for the pepper of a key."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs on the configured database."""
    settings = storage.read_settings(environ)
    if args.verb == "add":
        _check_tiers(configure(environ), args.tiers)
        event_loop.run(_add(settings, args, now()))
    elif args.verb == "ls":
        event_loop.run(_list(settings, args, now()))
    elif args.verb == "show":
        event_loop.run(_show(settings, args, now()))
    elif args.verb == "rotate":
        event_loop.run(_rotate(settings, args, now()))
    else:
        event_loop.run(_revoke(settings, args, now()))
    return 0


def find_key(rows: Sequence[KeyRow], name: str, now: float) -> KeyRow:
    """Return the key of this id, this whole key, or this name. Raises `NotFound` for none, and for several.

    A name is looked for among the keys in force first, because a name may be given again once its key has ended.
    """
    public_id = name
    if name.startswith("bt_"):
        public_id = name.split("_")[1]
    for row in rows:
        if row.id == public_id:
            return row
    namesakes = [row for row in rows if row.name == name]
    matches = [row for row in namesakes if is_in_force(row, now)]
    if not matches:
        matches = namesakes
    if not matches:
        raise NotFound("There is no key with this id or name; `baton keys ls` lists them.")
    if len(matches) > 1:
        ids = ", ".join([row.id for row in matches])
        raise NotFound(f"{len(matches)} keys are called {name}; give the id of one: {ids}.")
    return matches[0]


def _check_tiers(config: Configuration, tiers: Sequence[str]) -> None:
    unknown = sorted(set(tiers) - set(config.catalog.tiers))
    if unknown:
        tier_names = ", ".join(config.catalog.tiers)
        raise ConfigInvalid([f"--tier {name}: there is no such tier; there are {tier_names}" for name in unknown])


# -- add and rotate


async def _add(settings: Settings, args: Arguments, now: float) -> None:
    expires_at = None
    if args.expires:
        expires_at = now + args.expires
    key, row = mint(
        peppers(settings)[0],
        tenant=args.tenant,
        name=args.name,
        scopes=scopes_of(args.roles, args.scopes) or ROLES["caller"],
        now=now,
    )
    row = replace(
        row,
        expires_at=expires_at,
        tiers=frozenset(args.tiers),
        labels=frozenset(args.labels),
        max_usd=args.usd,
        rpm=args.rpm,
        tpm=args.tpm,
        concurrency=args.concurrency,
        all_tenants=args.all_tenants,
    )
    async with storage.open_configured_store(settings) as store:
        await store.add_key(row, by=storage.operator())
    _print_secret(args, settings, row, key, now, "The key, shown only this once:")


async def _rotate(settings: Settings, args: Arguments, now: float) -> None:
    overlap = args.overlap
    if args.no_overlap:
        overlap = 0.0
    async with storage.open_configured_store(settings) as store:
        row = find_key(await store.keys(), args.key, now)
        pepper = peppers(settings)[0]
        key, digest = new_secret(row, pepper)
        mark = pepper_mark(pepper)
        by = storage.operator()
        if not is_in_force(row, now) or not await store.rotate_key(row.id, digest, now + overlap, mark, by=by):
            raise NotFound(f"The key {row.id} is not in force any more; make a new one with `baton keys add`.")
        row = await store.key(row.id) or row
    works = "the old one does not work any more"
    if overlap:
        works = f"the old one works until {_day(now + overlap)} UTC"
    _print_secret(args, settings, row, key, now, f"The new secret of {row.name}, shown only this once; {works}:")


def _print_secret(args: Arguments, settings: Settings, row: KeyRow, key: str, now: float, words: str) -> None:
    note = pepper_note(settings)
    if note is not None:
        terminal.stderr().print(f"note: {note}.", soft_wrap=True)
    if args.json:
        terminal.print_json(_record(row, settings, now) | {"key": key})
        return
    terminal.stderr().print(words, soft_wrap=True)
    print(key, flush=True)


# -- ls and show


async def _list(settings: Settings, args: Arguments, now: float) -> None:
    async with storage.open_configured_store(settings) as store:
        rows = await store.keys()
    if args.json:
        terminal.print_json([_record(row, settings, now) for row in rows])
        return
    table = terminal.table()
    for column in ("id", "name", "tenant", "role", "scopes", "tiers", "labels", "limits", "made", "state"):
        table.add_column(column, overflow="fold")
    for row in rows:
        terminal.add_row(table, _cells(row, settings, now))
    terminal.print_table(table, "There are no keys; `baton keys add NAME` makes one.")


async def _show(settings: Settings, args: Arguments, now: float) -> None:
    async with storage.open_configured_store(settings) as store:
        row = find_key(await store.keys(), args.key, now)
    if args.json:
        terminal.print_json(_record(row, settings, now))
        return
    names = ("id", "name", "tenant", "role", "scopes", "tiers", "labels", "limits", "made", "state")
    for name, cell in zip(names, _cells(row, settings, now), strict=True):
        print(f"{name:<8}  {terminal.clean(cell)}")


def _record(row: KeyRow, settings: Settings, now: float) -> dict[str, Any]:
    """Return a key without its secret. Times are seconds since 1970, amounts are dollars."""
    return key_to_json(row, now) | {"pepper": _pepper_state(row, settings)}


def _cells(row: KeyRow, settings: Settings, now: float) -> tuple[str, ...]:
    tenant = row.tenant
    if row.all_tenants:
        tenant = f"{tenant}, reads all"
    return (
        row.id,
        row.name,
        tenant,
        role_of(row.scopes) or "-",
        ", ".join(sorted(row.scopes)),
        ", ".join(sorted(row.tiers)) or "all",
        ", ".join(sorted(row.labels)) or "-",
        ", ".join(_limits(row)) or "-",
        _day(row.created_at),
        _state(row, settings, now),
    )


def _limits(row: KeyRow) -> list[str]:
    """Return the limits that the key has, in words."""
    limits = []
    if row.max_usd is not None:
        limits.append(f"{terminal.dollars(row.max_usd)} a run")
    if row.rpm is not None:
        limits.append(f"{row.rpm} requests a minute")
    if row.tpm is not None:
        limits.append(f"{row.tpm} tokens a minute")
    if row.concurrency is not None:
        limits.append(f"{row.concurrency} runs at once")
    return limits


def _state(row: KeyRow, settings: Settings, now: float) -> str:
    if row.revoked_at is not None:
        return f"revoked {_day(row.revoked_at)}"
    old = ""
    if (row.previous_until or 0.0) > now:
        old = f", old secret until {_day(row.previous_until)}"
    old += PEPPER_NOTES[_pepper_state(row, settings)]
    if row.expires_at is None:
        return f"in force{old}"
    if row.expires_at <= now:
        return f"expired {_day(row.expires_at)}{old}"
    return f"until {_day(row.expires_at)}{old}"


def _pepper_state(row: KeyRow, settings: Settings) -> str:
    """Return under which pepper the key is hashed: `current`, `earlier`, `missing`, or `unknown`."""
    if row.pepper is None:
        return "unknown"
    marks = [pepper_mark(pepper) for pepper in peppers(settings)]
    if row.pepper not in marks:
        return "missing"
    if row.pepper == marks[0]:
        return "current"
    return "earlier"


def _day(at: float | None) -> str:
    return terminal.minute(at or 0.0)


# -- revoke


async def _revoke(settings: Settings, args: Arguments, now: float) -> None:
    async with storage.open_configured_store(settings) as store:
        row = await _revoke_key(store, args.id, now)
    if args.json:
        terminal.print_json(_record(row, settings, now))
        return
    words = f"Key {row.id} ({row.name}) is revoked; gateways follow within five seconds."
    terminal.stdout().print(words, soft_wrap=True)


async def _revoke_key(store: Store, name: str, now: float) -> KeyRow:
    row = find_key(await store.keys(), name, now)
    await store.revoke_key(row.id, now, by=storage.operator())
    return await store.key(row.id) or row
