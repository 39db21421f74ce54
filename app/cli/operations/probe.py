"""`baton probe` asks the gateway on this machine if it is ready, for health checks of containers."""

import http.client
import json
from collections.abc import Callable, Mapping

from app.cli.arguments import Arguments
from app.process.config import read

TIMEOUT_SECONDS = 4.0


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Return 0 if `/readyz` answers 200; otherwise print the reason and return 1."""
    port = read(environ).port
    connection = http.client.HTTPConnection(args.host, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/readyz")
        reply = connection.getresponse()
        print(reply.read(4096).decode("utf-8", "replace"))
        return int(reply.status != 200)
    except (OSError, http.client.HTTPException) as error:
        text = f"nothing answers on port {port} ({type(error).__name__})"
        if args.json:
            text = json.dumps({"ready": False, "error": text})
        print(text)
        return 1
    finally:
        connection.close()
