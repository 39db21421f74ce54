"""F-32: no memory, no files, no room for logs, no names, and certificates that have run out."""

import asyncio
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from app.core.run.events import Kind
from tests.faults.accounts import account, accounts, settle
from tests.faults.load import flood
from tests.faults.network_proxy import NetworkProxy, run_proxy, running_loop
from tests.faults.points import at, case
from tests.faults.scene import WORKERS, Scene, ask, over, probe, scene
from tests.harness.servers import free_port
from tests.harness.waiting import wait_until
from tests.stubs import Reply
from tests.stubs.control import StubControl

FILES = 48
FLOOD_SECONDS = 8.0
"""How long a hundred callers keep coming."""
Record = Callable[[str, object], None]


# -- memory


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("scarce"), seconds=90) as new_scene:
        yield new_scene


@at("F-32", "every process killed at once, as for want of memory", "0 runs lost once they are back", ci=True)
def test_everything_is_killed_at_once(plain: Scene, record_property: Record) -> None:
    plain.reset()
    for name in WORKERS:
        plain.stub.always(name, Reply(chunks=(f"{name} ", "says so."), first_delay=0.3))
    with flood(plain.gateways, 30) as load:
        wait_until(lambda: plain.open_runs() > 20, within=20, what="the runs are in flight")
        load._stopping.set()
        for process in plain.processes:
            process.kill()
        plain.mend()
    assert settle(plain, 40) == []
    ours = accounts(plain.database)
    record_property("measured", f"{len(ours)} runs, {load.statuses[0]} callers lost their connection")
    assert {run.row["state"] for run in ours} == {"succeeded"}


@at("F-32", "log volume is full", "everything goes on without a log")
def test_a_full_log_volume_stops_nothing(plain: Scene) -> None:
    plain.reset()
    logs = [process.folder / f"{process.verb}-{process.port}.log" for process in plain.processes]
    try:
        for process, log in zip(plain.processes, logs, strict=True):
            process.kill()
            log.rename(log.with_suffix(".kept"))
            log.symlink_to("/dev/full")
        plain.mend()
        assert ask(plain.gateway, "baton-ultra").status == 200
        plain.orders.lay("raise stream.before[worker=alpha]")  # something worth a line
        assert ask(plain.gateway, "baton-mini").status == 200
        assert settle(plain) == []
    finally:
        for process, log in zip(plain.processes, logs, strict=True):
            process.kill()
            log.unlink()
            log.with_suffix(".kept").rename(log)


# -- files


@pytest.fixture(scope="module")
def scarce(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    few = ("--files", str(FILES))
    with scene(tmp_path_factory.mktemp("files"), program={"gateway": few, "dispatcher": few}) as new_scene:
        yield new_scene


@at("F-32", f"each process may open {FILES} files, a hundred callers come", "some wait or are refused, 0 runs lost")
def test_no_file_left(scarce: Scene, record_property: Record) -> None:
    scarce.reset()
    for name in WORKERS:
        scarce.stub.always(name, Reply(chunks=(f"{name} ", "says so."), first_delay=0.2))
    pids = [process.pid for process in scarce.processes]
    with flood(scarce.gateways, 100) as load:
        time.sleep(FLOOD_SECONDS)
    assert settle(scarce, 60) == []
    record_property("measured", str(dict(load.statuses)))
    assert set(load.statuses) <= {0, 200, 502, 503}
    assert [process.pid for process in scarce.processes if process.alive] == pids
    wait_until(scarce.gateway.ready, within=20, what="it is ready again")
    wait_until(lambda: ask(scarce.gateway, "baton-mini").status == 200, within=30, what="it serves again")
    assert settle(scarce) == []


# -- names and certificates


VALID, EXPIRED = "valid", "expired"
DATES = {VALID: ("20200101000000Z", "20990101000000Z"), EXPIRED: ("20200101000000Z", "20200201000000Z")}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates for 127.0.0.1, and the authority that signed them."""
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "index").write_text("")
    (folder / "ca.conf").write_text(
        "[ca]\ndefault_ca=it\n[it]\ndatabase=index\nnew_certs_dir=.\nserial=serial\ndefault_md=sha256\npolicy=any\n"
        "unique_subject=no\nx509_extensions=leaf\n[any]\ncommonName=supplied\n"
        "[leaf]\nsubjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n"
    )
    (folder / "serial").write_text("01")
    new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes"]
    commands = [[*new, "-x509", "-days", "3650", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem"]]
    for name, (start, end) in DATES.items():
        commands.append([*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"])
        signing = ["openssl", "ca", "-batch", "-config", "ca.conf", "-cert", "ca.pem", "-keyfile", "ca.key"]
        commands.append([*signing, "-startdate", start, "-enddate", end, "-in", f"{name}.csr", "-out", f"{name}.pem"])
    for command in commands:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@contextmanager
def wrap_in_tls(certificates: Path, name: str, line: NetworkProxy) -> Iterator[int]:
    """The port of a server that speaks TLS under that certificate, and forwards to the line."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    port = free_port()

    async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65_536):
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection("127.0.0.1", line.port)
        await asyncio.gather(carry(reader, onward), carry(there, writer))

    with running_loop("tls") as loop:
        opening = asyncio.start_server(serve, "127.0.0.1", port, ssl=context)
        server = asyncio.run_coroutine_threadsafe(opening, loop).result(10)
        try:
            yield port
        finally:
            loop.call_soon_threadsafe(server.close)


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[Scene]:
    """Three providers beside the stub itself: over TLS with each certificate, and one whose name nobody knows."""
    with ExitStack() as stack:

        def pools(stub: StubControl, to_stub: NetworkProxy) -> str:
            plain = over(to_stub, stub)[0]
            direct = stack.enter_context(run_proxy(to_stub.target))
            urls = {
                name: plain.replace("http://", "https://").replace(
                    f":{to_stub.port}/", f":{stack.enter_context(wrap_in_tls(certificates, name, direct))}/"
                )
                for name in DATES
            }
            urls |= {"nameless": "http://workers.invalid:9/v1", "good": plain}
            parts = [
                f'[providers.{name}]\nformat = "openai"\nbase_url = "{url}"\nkey = "STUB_KEY"\n'
                f'[workers.{name}]\nprovider = "{name}"\nmodel = "{name}"\nprice = {{ input = 1, output = 2 }}\n'
                for name, url in urls.items()
            ]
            tier = '[tiers.baton-mini]\npool = "all"\nlimits = { seconds = 40 }\n'
            return "".join(parts) + tier + 'conductor = { kind = "fixed", shape = "single", workers = ["good"] }\n'

        authority = str(certificates / "ca.pem")
        new_scene = scene(tmp_path_factory.mktemp("far"), dispatchers=1, pools=pools, SSL_CERT_FILE=authority)
        yield stack.enter_context(new_scene)


def away(name: str, place: str) -> object:
    expectation = "said so in the journal, answered by another worker"
    return case(name, family="F-32", place=place, expectation=expectation, ci=True, name=name)


@pytest.mark.parametrize(
    "name",
    [
        away("nameless", "provider's name is not known any more"),
        away(EXPIRED, "provider's certificate has run out"),
    ],
)
def test_a_provider_that_cannot_be_trusted_or_found(far: Scene, name: str, record_property: Record) -> None:
    far.reset()
    answered = ask(far.gateway, "baton-mini", extra_body=only(name, "good"))
    assert settle(far) == []
    run = account(far, answered.run)
    errors = [body["error"] for body in run.bodies(Kind.CALL_FINISHED) if body["outcome"] == "error"]
    record_property("measured", ", ".join(errors))
    assert (answered.status, run.outcomes()[0][-1]) == (200, "ok")
    assert set(errors) == {"worker_unavailable"}
    assert far.stub.requests(name) == [], "nothing was sent to it"
    assert probe(far.gateway, "/readyz") == 200


def test_a_certificate_that_is_valid_is_taken(far: Scene) -> None:
    """Else the case above would prove nothing."""
    far.reset()
    answered = ask(far.gateway, "baton-mini", extra_body=only(VALID))
    assert (answered.status, len(far.stub.requests(VALID))) == (200, 1)
    assert settle(far) == []


def only(worker: str, *others: str) -> dict[str, object]:
    """Return a plan for that worker, in a pool of these."""
    plan = {"steps": [{"worker": worker, "subtask": "Answer.", "access": ["user"]}]}
    return {"baton": {"plan": plan, "pool": {"allow": [worker, *others]}}}
