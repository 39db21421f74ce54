"""F-31: every secret is replaced while a gateway and an engine go on serving, as deploy/docs/secrets.md says."""

import base64
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import InvalidWebhookSignatureError, OpenAI

from tests.faults.fleet import PRESENT, VERBS, Fleet, fleet
from tests.faults.points import at
from tests.harness.processes import Process, open_caller, run_command
from tests.harness.waiting import wait_until
from tests.stubs import KEYS, Reply

pytestmark = pytest.mark.timeout(300)
OLD, NEW = "old-" * 10, "new-" * 10
FIRST, SECOND = (f"whsec_{base64.b64encode(letter * 32).decode()}" for letter in (b"a", b"b"))
WORDS = tuple(f"word{number} " for number in range(8))
Came = list[tuple[dict[str, str], bytes]]


@contextmanager
def receiver() -> Iterator[tuple[str, Came]]:
    """A receiver of webhooks at that address, and what it has got."""
    came: Came = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append((dict(self.headers), self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/hook", came
        server.shutdown()
        thread.join()


@contextmanager
def run_installation(folder: Path, address: str) -> Iterator[Fleet]:
    """A gateway and an engine whose secrets stand in files."""
    files = {"pepper": OLD, "webhook": FIRST, "provider": KEYS["openai"]}
    for name, value in files.items():
        (folder / name).write_text(value + "\n")
    with fleet(folder) as scene:
        PRESENT.migrate(folder, scene.environ)
        others = {name: value for name, value in scene.environ.items() if name not in ("BATON_PEPPER", "STUB_KEY")}
        scene.environ = {
            **others,
            "BATON_PEPPER_FILE": str(folder / "pepper"),
            "BATON_WEBHOOK_URL": address,
            "BATON_WEBHOOK_SECRET_FILE": str(folder / "webhook"),
            "STUB_KEY_FILE": str(folder / "provider"),
        }
        scene.stub.always("alpha", Reply(chunks=WORDS, gap=0.03))
        for verb in VERBS:
            scene.add(PRESENT, verb, 1)
        scene.wait()
        yield scene


def reload(process: Process) -> None:
    """Send SIGHUP, and wait until the process has said what came of it."""
    before = process.log.count("read again")
    os.kill(process.pid, signal.SIGHUP)
    wait_until(lambda: process.log.count("read again") > before, what="the files are read again")


def reload_all(scene: Fleet, file: str, value: str) -> None:
    """Write a secret to its file and have every process read it."""
    (scene.folder / file).write_text(value + "\n")
    for processes in scene.processes.values():
        for process in processes:
            reload(process)


def keys(scene: Fleet, *words: str) -> Mapping[str, Any]:
    """Return the record of one key, as `baton keys` prints it."""
    result = run_command(scene.folder, scene.environ, "keys", *words, "--json")
    assert result.returncode == 0, result.stderr
    key_body: dict[str, Any] = json.loads(result.stdout)
    return key_body


def works(gateway: Process, key: str) -> bool:
    """Return whether the gateway accepts that key."""
    with open_caller(gateway.url, key) as caller:
        try:
            caller.client.models.list()
        except openai.AuthenticationError:
            return False
    return True


def streams(gateway: Process, key: str) -> None:
    """The answer comes word by word: what the engine publishes is accepted by the gateway."""
    with open_caller(gateway.url, key) as caller:
        text, document = caller.ask_streaming("baton-mini", "Tell.")
    assert text == "".join(WORDS)
    assert document["deltas"] > 2, "a gateway that drops live messages sends the answer in one piece"


@at("F-31", "the pepper replaced while everything runs", "keys stay valid; no message is dropped", ci=True)
def test_the_pepper_is_rotated(tmp_path: Path) -> None:
    with receiver() as (address, _), run_installation(tmp_path, address) as scene:
        (gateway,), (engine,) = scene.processes["gateway"], scene.processes["dispatcher"]
        used, unused = keys(scene, "add", "used"), keys(scene, "add", "unused")
        key = used["key"]
        assert used["pepper"] == "current"
        streams(gateway, key)
        reload_all(scene, "pepper", f"{OLD}\n{NEW}")
        (tmp_path / "pepper").write_text(f"{NEW}\n{OLD}\n")
        reload(engine)  # one process after the other: they share keys and messages all the same
        streams(gateway, key)
        reload(gateway)
        streams(gateway, key)
        assert keys(scene, "show", "unused")["pepper"] == "earlier"

        def moved() -> bool:
            return works(gateway, key) and keys(scene, "show", "used")["pepper"] == "current"

        wait_until(moved, what="the key is hashed under the new pepper")
        reload_all(scene, "pepper", NEW)
        streams(gateway, key)
        assert keys(scene, "show", "unused")["pepper"] == "missing"
        assert not works(gateway, unused["key"])
        assert works(gateway, keys(scene, "rotate", "unused", "--no-overlap")["key"])
        assert gateway.metric("baton_messages_forged") == 0


@at("F-31", "the webhook's secret replaced while everything runs", "each message verifies with either secret", ci=True)
def test_the_secret_of_webhooks_is_rotated(tmp_path: Path) -> None:
    with receiver() as (address, came), run_installation(tmp_path, address) as scene:
        (gateway,) = scene.processes["gateway"]

        def verified() -> tuple[bool, bool]:
            """Return whether the webhook of a new response verifies with each of the two secrets."""
            came.clear()
            with open_caller(gateway.url) as caller:
                response = caller.client.responses.create(model="baton-mini", input="Tell.", background=True)
            wait_until(lambda: came, what="the webhook is delivered")
            ((headers, body),) = came
            assert json.loads(body)["data"]["id"] == response.id
            return verifies(headers, body, FIRST), verifies(headers, body, SECOND)

        assert verified() == (True, False)
        reload_all(scene, "webhook", f"{SECOND} {FIRST}")
        assert verified() == (True, True)
        reload_all(scene, "webhook", SECOND)
        assert verified() == (False, True)
        for processes in scene.processes.values():
            (tmp_path / "webhook").write_text("whsec_short\n")
            os.kill(processes[0].pid, signal.SIGHUP)
            wait_until(lambda process=processes[0]: "last valid ones stay" in process.log, what="the fault is logged")
        assert verified() == (False, True)


def verifies(headers: Mapping[str, str], body: bytes, secret: str) -> bool:
    """Return whether the official client accepts the message with that secret."""
    try:
        OpenAI(api_key="unused").webhooks.unwrap(body, headers, secret=secret)
    except InvalidWebhookSignatureError:
        return False
    return True


@at("F-31", "a provider's key replaced while everything runs", "the next call has the new key, at once", ci=True)
def test_the_key_of_a_provider_is_rotated(tmp_path: Path) -> None:
    with receiver() as (address, _), run_installation(tmp_path, address) as scene:
        (gateway,) = scene.processes["gateway"]
        with open_caller(gateway.url) as caller:
            assert caller.ask_whole("baton-mini", "Tell.")[0] == "".join(WORDS)
            reload_all(scene, "provider", "revoked")
            with pytest.raises(openai.APIStatusError):
                caller.ask_whole("baton-mini", "Tell.")
            reload_all(scene, "provider", KEYS["openai"])
            count_before = len(scene.stub.requests("alpha"))
            assert caller.ask_whole("baton-mini", "Tell.")[0] == "".join(WORDS), "its workers are not ejected any more"
            assert len(scene.stub.requests("alpha")) == count_before + 1
