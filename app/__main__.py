"""The command line."""

import asyncio
import os
import sys

from app.config import configure
from app.serving import Roles, Started, serve
from app.telemetry import log_to_stderr


def main() -> int:
    """Run one command; the exit status."""
    loaded = configure(os.environ)
    log_to_stderr(loaded.settings.log_level)

    def announce(started: Started) -> None:
        print(started, file=sys.stderr)

    roles = {"serve": Roles(True, True), "gateway": Roles(True, False), "dispatcher": Roles(False, True)}
    asyncio.run(serve(loaded, dict(os.environ), roles[sys.argv[1]], announce))
    return 0


if __name__ == "__main__":
    sys.exit(main())
