"""`baton config` prints every setting with its value, and the origin of the pool."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.text import Text

from app.cli import terminal
from app.cli.arguments import Arguments
from app.process.config import Configuration, configure, describe


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Print the settings with masked secrets. Raises `ConfigInvalid` for a faulty configuration."""
    config = configure(environ)
    if args.json:
        terminal.print_json(_record(config))
        return 0
    table = terminal.table("setting", "value", "default", "from", "meaning")
    for row in describe(config.settings):
        style = ""
        if row.origin != "default":
            style = "bold"
        cells = (row.name, row.value, row.default, row.origin, row.meaning)
        table.add_row(*(Text(cell, style=style, overflow="fold") for cell in cells))
    console = terminal.stdout()
    console.print(table)
    catalog = config.catalog
    console.print(f"\nPool: {config.origin}")
    for tier in catalog.tiers.values():
        console.print(f"  {tier.name}: {', '.join(tier.pool)}", soft_wrap=True)
    for note in config.notes:
        console.print(f"  note: {note}", soft_wrap=True)
    return 0


def _record(config: Configuration) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for row in describe(config.settings):
        record = {"name": row.name, "value": row.value, "default": row.default}
        rows.append(record | {"from": row.origin, "meaning": row.meaning})
    tiers = {tier.name: list(tier.pool) for tier in config.catalog.tiers.values()}
    return {"settings": rows, "pool": {"from": config.origin, "tiers": tiers}, "notes": list(config.notes)}
