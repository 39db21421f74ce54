"""The distributed service that the browser looks at: a gateway with its admin listener, and an engine."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from msgspec import Struct
from sqlalchemy.engine import make_url

from app.store.sqlkit.migrate import migrate
from tests.harness.processes import KEY, Caller, Process, open_caller
from tests.harness.servers import free_port
from tests.harness.waiting import wait_until
from tests.integration.installation import execute, launch, pool, settings
from tests.stubs.control import StubControl, stub_process


class Service(Struct, frozen=True):
    """The running service; `caller` is the official client of its API."""

    stub: StubControl
    database: str
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

    def new_key(self, name: str, *scopes: str) -> str:
        """Make a key of another person; return its secret."""
        key_body = self.api("POST", f"{self.admin}/admin/v1/keys", json={"name": name, "scopes": scopes})
        return str(key_body.json()["key"])


@contextmanager
def serving(postgres: str, redis: str, limits: str = "limits = { seconds = 40 }") -> Iterator[Service]:
    """Run the service over these servers, in a database of its own, for the length of the block. `limits` are those of
    the tier `baton-ultra`, as its line of the pool file."""
    name = f"baton_test_{uuid.uuid4().hex}"
    database = make_url(postgres).set(database=name).render_as_string(hide_password=False)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        stub = stack.enter_context(stub_process())
        asyncio.run(execute(postgres, f'CREATE DATABASE "{name}" TEMPLATE template0'))
        stack.callback(lambda: asyncio.run(execute(postgres, f'DROP DATABASE "{name}" WITH (FORCE)')))
        migrate(database)
        port = free_port()
        environ = settings(folder, stub, database, redis) | {"BATON_ADMIN_PORT": str(port)}
        usual = pool(stub)
        (folder / "pool.toml").write_text(usual[: usual.rindex("limits = {")] + limits + "\n")
        gateway, engine = stack.enter_context(launch(folder, environ, "gateway", "dispatcher"))
        wait_until(gateway.ready)
        caller = stack.enter_context(open_caller(gateway.url))
        yield Service(stub, database, gateway, engine, f"http://127.0.0.1:{port}", caller)
