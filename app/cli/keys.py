"""`baton keys add|ls|revoke` manages the API keys of callers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from rich.table import Table
from rich.text import Text

from app.cli import event_loop, storage, terminal
from app.cli.asked import Asked
from app.errors import ConfigInvalid, NotFound
from app.gateway.http.auth import mint
from app.process.config import Loaded, Settings, configure, pepper, read
from app.store.protocol import KeyRow, Keys

USUAL = ("runs:write", "runs:read")


def run(asked: Asked, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs on the configured database."""
    settings = read(environ)
    terminal.log_to_stderr("warning")
    storage.announce(settings)
    if asked.verb == "add":
        _check_tiers(configure(environ), asked.tiers or [])
        event_loop.run(_add(settings, asked, now()))
    elif asked.verb == "ls":
        event_loop.run(_list(settings, now()))
    else:
        event_loop.run(_revoke(settings, asked.id, now()))
    return 0


def _check_tiers(loaded: Loaded, tiers: list[str]) -> None:
    unknown = sorted(set(tiers) - set(loaded.catalog.tiers))
    if unknown:
        known = ", ".join(loaded.catalog.tiers)
        raise ConfigInvalid([f"--tier {name}: there is no such tier; there are {known}" for name in unknown])


async def _add(settings: Settings, asked: Asked, now: float) -> None:
    key, row = mint(
        pepper(settings).get_secret_value().encode(),
        tenant=asked.tenant,
        name=asked.name,
        scopes=asked.scopes or USUAL,
        now=now,
        expires_at=now + asked.expires if asked.expires else None,
    )
    row = replace(
        row,
        tiers=frozenset(asked.tiers or ()),
        labels=frozenset(asked.labels or ()),
        max_usd=asked.usd,
        rpm=asked.rpm,
        tpm=asked.tpm,
        concurrency=asked.concurrency,
        all_tenants=asked.all_tenants,
    )
    async with storage.opened(settings) as store:
        await store.add_key(row)
    terminal.err().print("The key, shown only this once:")
    print(key, flush=True)


async def _list(settings: Settings, now: float) -> None:
    async with storage.opened(settings) as store:
        rows = await store.keys()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("id", "name", "tenant", "scopes", "tiers", "labels", "limits", "made", "state"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(terminal.clean(cell)) for cell in _cells(row, now)))
    terminal.out().print(table if rows else "There are no keys; `baton keys add NAME` makes one.")


def _cells(row: KeyRow, now: float) -> tuple[str, ...]:
    limits = (
        f"{terminal.dollars(row.max_usd)} a run" if row.max_usd is not None else "",
        f"{row.rpm} a minute" if row.rpm is not None else "",
        f"{row.tpm} tokens a minute" if row.tpm is not None else "",
        f"{row.concurrency} at once" if row.concurrency is not None else "",
    )
    return (
        row.id,
        row.name,
        f"{row.tenant}, reads all" if row.all_tenants else row.tenant,
        ", ".join(sorted(row.scopes)),
        ", ".join(sorted(row.tiers)) or "all",
        ", ".join(sorted(row.labels)) or "-",
        ", ".join(limit for limit in limits if limit) or "-",
        _day(row.created_at),
        _state(row, now),
    )


def _state(row: KeyRow, now: float) -> str:
    if row.revoked_at is not None:
        return f"revoked {_day(row.revoked_at)}"
    if row.expires_at is None:
        return "in force"
    return f"{'expired' if row.expires_at <= now else 'until'} {_day(row.expires_at)}"


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


async def _revoke(settings: Settings, public_id: str, now: float) -> None:
    if public_id.startswith("bt_"):
        public_id = public_id.split("_")[1]
    async with storage.opened(settings) as store:
        await _end(store, public_id, now)
    terminal.out().print(f"Key {public_id} is revoked; gateways follow within five seconds.", markup=False)


async def _end(store: Keys, public_id: str, now: float) -> None:
    if not await store.revoke_key(public_id, now):
        raise NotFound("There is no key of that id; `baton keys ls` lists them.")
