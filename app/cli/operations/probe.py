"""`baton probe` asks the gateway on this machine if it is ready, for health checks of containers."""

import http.client
import json
from collections.abc import Callable, Mapping

from app.cli.arguments import Arguments
from app.process.config import read

TIMEOUT_SECONDS = 4.0


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Print what `/readyz` answers, or why it does not. Returns 0 if it answers 200."""
    port = read(environ).port
    connection = http.client.HTTPConnection(args.host, port, timeout=TIMEOUT_SECONDS)
    is_ready = False
    try:
        connection.request("GET", "/readyz")
        reply = connection.getresponse()
        text, is_ready = reply.read(4096).decode("utf-8", "replace"), reply.status == 200
    except (OSError, http.client.HTTPException) as error:
        text = f"nothing answers on port {port} ({type(error).__name__})"
        if args.json:
            text = json.dumps({"ready": False, "error": text})
    finally:
        connection.close()
    print(text)
    return int(not is_ready)
