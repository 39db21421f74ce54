"""`baton probe`: whether the gateway on this machine is ready, for health checks of containers."""

import argparse
import http.client
from collections.abc import Callable, Mapping

from app.process.config import read

PATIENCE = 4.0


def run(asked: argparse.Namespace, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """0 if `/readyz` says so, else 1 with a word on why."""
    port = read(environ).port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", "/readyz")
        reply = connection.getresponse()
        print(reply.read(4096).decode("utf-8", "replace"))
        return 0 if reply.status == 200 else 1
    except (OSError, http.client.HTTPException) as error:
        print(f"nothing answers on port {port} ({type(error).__name__})")
        return 1
    finally:
        connection.close()
