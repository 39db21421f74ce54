"""`baton serve`, `baton gateway` and `baton dispatcher` run one process of the service until it is stopped."""

import errno
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from msgspec import Struct

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


class Listener(Struct, frozen=True):
    """An address on which this process is to listen."""

    host: str
    port: int
    port_options: str
    """The options and settings that name the port."""
    address_options: str
    """The options and settings that name the host and the port together."""


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


def _listeners(settings: Settings, roles: Roles) -> list[Listener]:
    listeners = []
    if roles.gateway:
        listeners.append(Listener(settings.host, settings.port, "--port or BATON_PORT", "--host and --port"))
    if settings.metrics_port is not None:
        options = "BATON_METRICS_PORT", "BATON_METRICS_HOST and BATON_METRICS_PORT"
        listeners.append(Listener(settings.metrics_host or settings.host, settings.metrics_port, *options))
    if roles.gateway and settings.admin_port is not None:
        options = "BATON_ADMIN_PORT", "BATON_ADMIN_HOST and BATON_ADMIN_PORT"
        listeners.append(Listener(settings.admin_host, settings.admin_port, *options))
    return listeners


def _refuse_shared_addresses(listeners: Sequence[Listener]) -> None:
    """Raise `ConfigInvalid` if two listeners of this process have the same address."""
    for first, second in combinations(listeners, 2):
        is_shared_host = first.host == second.host or {first.host, second.host} & EVERY_ADDRESS
        if first.port == second.port != 0 and is_shared_host:
            raise ConfigInvalid(
                [
                    f"{second.port_options}: is the port of another listener, {first.port}; change it, or "
                    f"{first.port_options}"
                ]
            )


def _why_not_listening(listeners: Sequence[Listener]) -> str:
    """Return the reason why the service cannot listen on one of its addresses, found by another try."""
    for listener in listeners:
        host, port = listener.host, listener.port
        family = socket.AF_INET
        if ":" in host:
            family = socket.AF_INET6
        try:
            with socket.socket(family) as attempt:
                attempt.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"{host}:{port} is in use by another program; choose another port with {listener.port_options}"
            return f"cannot listen on {host}:{port}: {error.strerror or error}; see {listener.address_options}"
    return "cannot listen on " + ", ".join(f"{listener.host}:{listener.port}" for listener in listeners)
