"""`baton content-keys rewrap` encrypts the content keys of all tenants under the present master key."""

from collections.abc import Callable, Mapping

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.errors import ConfigInvalid
from app.process.config import Settings


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command on the configured database."""
    settings = storage.read_settings(environ)
    if settings.content_keys is None:
        raise ConfigInvalid(["BATON_CONTENT_KEYS: is not set; nothing is encrypted without it"])
    event_loop.run(_rewrap(settings, args))
    return 0


async def _rewrap(settings: Settings, args: Arguments) -> None:
    async with storage.open_configured_store(settings) as store:
        key_count, rewrap_count = await store.rewrap_content_keys()
    if args.json:
        terminal.print_json({"keys": key_count, "rewrapped": rewrap_count})
        return
    terminal.stdout().print(
        f"{rewrap_count:,} of {key_count:,} content keys were encrypted anew; all are under the present key."
    )
