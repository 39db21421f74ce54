"""`baton serve`, `baton gateway` and `baton dispatcher` run one process of the service until it is stopped."""

from collections.abc import Callable, Mapping

from app.cli import event_loop, startup_message, terminal
from app.cli.asked import Asked
from app.process.config import configure
from app.process.serve import Roles, Started, serve

ROLES: Mapping[str, Roles] = {
    "serve": Roles(gateway=True, dispatcher=True),
    "gateway": Roles(gateway=True, dispatcher=False),
    "dispatcher": Roles(gateway=False, dispatcher=True),
}


def run(asked: Asked, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Serve. Returns 0 after an orderly stop."""
    loaded = configure(environ)
    terminal.log_to_stderr(loaded.settings.log_level)
    for note in loaded.notes:
        terminal.err().print(f"note: {note}", markup=False, soft_wrap=True)
    with terminal.err().status("starting") as status:

        def announce(started: Started) -> None:
            status.stop()
            if asked.json:
                print(startup_message.as_json(asked.verb, started), flush=True)
            else:
                print(startup_message.words(asked.verb, started, terminal.program()), flush=True)

        event_loop.run(serve(loaded, dict(environ), ROLES[asked.verb], announce))
    return 0
