"""`baton probe` asks the gateway on this machine if it is ready, for health checks of containers."""

import http.client
import json
from collections.abc import Callable, Mapping
from contextlib import closing

from app.cli.arguments import Arguments
from app.process.config import read

TIMEOUT_SECONDS = 4.0


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Print what `/readyz` answers, or why it does not. Returns 0 if it answers 200."""
    port = read(environ).port
    is_ready = False
    try:
        with closing(http.client.HTTPConnection(args.host, port, timeout=TIMEOUT_SECONDS)) as connection:
            connection.request("GET", "/readyz")
            reply = connection.getresponse()
            text, is_ready = reply.read(4096).decode("utf-8", "replace"), reply.status == 200
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last one is of no name of a host
        text = f"nothing answers on port {port} ({type(error).__name__})"
        if args.json:
            text = json.dumps({"ready": False, "error": text})
    print(text)
    return int(not is_ready)
