"""`baton serve`, `baton gateway` and `baton dispatcher` run one process of the service until it is stopped."""

import errno
import socket
import sys
from collections.abc import Callable, Mapping

from app.cli import event_loop, terminal
from app.cli.arguments import Arguments
from app.cli.operations import startup_message
from app.process.config import Settings, configure
from app.process.serve import Announcement, Roles, serve

ROLES: Mapping[str, Roles] = {
    "serve": Roles(gateway=True, dispatcher=True),
    "gateway": Roles(gateway=True, dispatcher=False),
    "dispatcher": Roles(gateway=False, dispatcher=True),
}


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Serve. Returns 0 after an orderly stop."""
    config = configure(environ)
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
            print(f"baton: {_why_not_listening(config.settings, ROLES[args.verb])}", file=sys.stderr)
            return 1
    return 0


def _why_not_listening(settings: Settings, roles: Roles) -> str:
    """Return the reason why the service cannot listen on one of its addresses, found by another try."""
    places = []
    if roles.gateway:
        places.append((settings.host, settings.port, "--port or BATON_PORT", "--host and --port"))
    if settings.metrics_port is not None:
        options = "BATON_METRICS_PORT", "BATON_METRICS_HOST and BATON_METRICS_PORT"
        places.append((settings.metrics_host or settings.host, settings.metrics_port, *options))
    if roles.gateway and settings.admin_port is not None:
        options = "BATON_ADMIN_PORT", "BATON_ADMIN_HOST and BATON_ADMIN_PORT"
        places.append((settings.admin_host, settings.admin_port, *options))
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
