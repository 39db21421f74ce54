"""Many operations of two tenants over every route, then every command that takes a tenant, and what came of them.

    python -m tests.isolation [--operations 10000] [--database sqlite|postgres] [--seed 0]

Exit code 1 if anything of one tenant's was shown to the other, or changed by it.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.store.sqlkit.migrate import migrate
from tests.harness import servers
from tests.harness.in_process import pool_text, running_service
from tests.isolation.commands import words_of_others
from tests.isolation.operations import EVERY_REQUEST, ONE_PERSON, Report, play
from tests.stubs import ProviderStub

LEAST = 20
"""How often each route is asked for foreign things at least."""


@contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if kind == "sqlite":
        yield f"sqlite:///{folder}/baton.db"
        return
    with servers.postgres() as server:
        migrate(server.url)
        yield server.url


async def play_operations(folder: Path, environ: dict[str, str], operations: int, seed: int) -> Report:
    """Carry out the operations on a service."""
    async with ProviderStub() as stub, running_service(folder, pool_text(stub) + ONE_PERSON, environ) as runtime:
        return await play(runtime, stub, operations, seed, least=LEAST, browses=True)


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.isolation")
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="postgres")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name, database(options.database, Path(name)) as url:
        folder, environ = Path(name), {"BATON_DATABASE_URL": url}
        report = asyncio.run(play_operations(folder, environ, options.operations, options.seed))
        commands = words_of_others(folder, environ)
    seconds = time.monotonic() - began
    print(
        f"{report.request_count} operations ({report.pages} on pages of the console) in {seconds:.0f} s "
        f"on {options.database}"
    )
    for route in sorted(EVERY_REQUEST):
        print(f"  {route[0]:6} {route[1]:40} {report.reached[route]:6} own  {report.operations[route]:6} foreign")
    for name, names in commands.items():
        print(f"  baton {name:41} {'a leak' if names else 'nothing foreign'}")
    leaks = [*report.leaks, *[name for name, names in commands.items() if names]]
    for title, wrong in (("leaks", leaks), ("changes", report.meddlings), ("faults", report.faults)):
        print(f"{title}: {len(wrong)}", *wrong[:20], sep="\n  ")
    return bool(leaks or report.meddlings or report.faults)


if __name__ == "__main__":
    sys.exit(main())
