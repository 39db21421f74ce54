"""`baton serve`, `baton gateway` and `baton dispatcher` run one process of the service until it is stopped."""

import errno
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from app.cli import event_loop, terminal
from app.cli.arguments import Arguments
from app.cli.operations import startup_message
from app.errors import ConfigInvalid
from app.process.config import Settings, configure
from app.process.serve import Announcement, Roles, serve

ROLES: Mapping[str, Roles] = {
    "serve": Roles(gateway=True, dispatcher=True),
    "gateway": Roles(gateway=True, dispatcher=False),
    "dispatcher": Roles(gateway=False, dispatcher=True),
}
EVERY_ADDRESS = frozenset({"0.0.0.0", "::", ""})


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Serve. Returns 0 after an orderly stop."""
    config = configure(environ)
    listeners = _listeners(config.settings, ROLES[args.verb])
    _refuse_shared_addresses(listeners)
    terminal.log_to_stderr(config.settings.log_level)
    for note in config.notes:
        terminal.stderr().print(f"note: {note}", soft_wrap=True)
    with terminal.stderr().status("starting") as status:

        def announce(announcement: Announcement) -> None:
            status.stop()
            if args.json:
                print(startup_message.announcement_json(args.verb, announcement), flush=True)
            else:
                print(
                    startup_message.announcement_text(args.verb, announcement, terminal.program_command()), flush=True
                )

        try:
            event_loop.run(serve(config, dict(environ), ROLES[args.verb], announce))
        except SystemExit:  # uvicorn's, when it cannot listen
            status.stop()
            print(f"baton: {_why_not_listening(listeners)}", file=sys.stderr)
            return 1
    return 0


def _listeners(settings: Settings, roles: Roles) -> list[tuple[str, int, str, str]]:
    """Return host and port of each listener, then what sets the port, and what sets both."""
    places = []
    if roles.gateway:
        places.append((settings.host, settings.port, "--port or BATON_PORT", "--host and --port"))
    if settings.metrics_port is not None:
        options = "BATON_METRICS_PORT", "BATON_METRICS_HOST and BATON_METRICS_PORT"
        places.append((settings.metrics_host or settings.host, settings.metrics_port, *options))
    if roles.gateway and settings.admin_port is not None:
        options = "BATON_ADMIN_PORT", "BATON_ADMIN_HOST and BATON_ADMIN_PORT"
        places.append((settings.admin_host, settings.admin_port, *options))
    return places


def _refuse_shared_addresses(places: Sequence[tuple[str, int, str, str]]) -> None:
    """Raise `ConfigInvalid` if two listeners of this process have the same address."""
    for (host, port, first, _), (other_host, other_port, second, _) in combinations(places, 2):
        if port == other_port != 0 and (host == other_host or {host, other_host} & EVERY_ADDRESS):
            raise ConfigInvalid([f"{second}: is the port of another listener, {port}; change it, or {first}"])


def _why_not_listening(places: Sequence[tuple[str, int, str, str]]) -> str:
    """Return the reason why the service cannot listen on one of its addresses, found by another try."""
    for host, port, another, both in places:
        family = socket.AF_INET
        if ":" in host:
            family = socket.AF_INET6
        try:
            with socket.socket(family) as listener:
                listener.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"{host}:{port} is in use by another program; choose another port with {another}"
            return f"cannot listen on {host}:{port}: {error.strerror or error}; see {both}"
    return "cannot listen on " + ", ".join(f"{host}:{port}" for host, port, *_ in places)
