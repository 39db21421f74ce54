"""The distributed service that the browser looks at: a gateway with its admin listener, and an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.harness.processes import KEY, Caller, Process, calling
from tests.harness.servers import free_port
from tests.harness.waiting import wait_until
from tests.integration.installation import launched, settings
from tests.stubs.control import StubControl


@dataclass(frozen=True, slots=True)
class Service:
    """The running service; `caller` is the official client of its API."""

    stub: StubControl
    gateway: Process
    engine: Process
    admin: str
    """The address of the admin listener."""
    caller: Caller

    @property
    def url(self) -> str:
        """The address of the API and of the console."""
        return self.gateway.url

    def api(self, method: str, path: str, **more: object) -> httpx.Response:
        """Ask the API, or with an absolute path the admin API, by the first key."""
        reply = self.caller.http.request(method, path, headers={"authorization": f"Bearer {KEY}"}, **more)  # type: ignore[arg-type]
        reply.raise_for_status()
        return reply


@contextmanager
def serving(folder: Path, stub: StubControl, database: str, redis: str) -> Iterator[Service]:
    """Run the service for the length of the block."""
    port = free_port()
    environ = settings(folder, stub, database, redis) | {"BATON_ADMIN_PORT": str(port)}
    with launched(folder, environ, "gateway", "dispatcher") as (gateway, engine):
        wait_until(gateway.ready)
        with calling(gateway.url) as caller:
            yield Service(stub, gateway, engine, f"http://127.0.0.1:{port}", caller)
