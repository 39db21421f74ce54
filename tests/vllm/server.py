"""Start and stop a real vLLM server on CPU, serving the tiny random model.

vLLM runs in an environment of its own (`tests/vllm/run` builds it), so tests reach it as any caller would: over HTTP.
It is several processes. They share one process group that nobody else is in, so that stopping can be complete and can
be checked, and a warden ends them when the test session dies without stopping them.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import psutil
from msgspec import Struct

from app.cli.arguments import Arguments
from app.cli.commands import parse
from app.cli.promotion import deployment
from app.lab import manifest
from app.process.config import read
from tests.harness.servers import free_port

ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
MODEL: Final = "conductor"
EMBEDDER: Final = "embedder"
TRAINED: Final = Path(__file__).with_name("trained")
CONTEXT: Final = 8192
RANK: Final = 16
"""The greatest of adapters that are loaded while it runs."""
START_SECONDS: Final = 400.0
STOP_SECONDS: Final = 20.0
LOOK_PAUSE: Final = 0.2
"""Seconds between two looks at the server."""
LOG_TAIL: Final = 4000
# Waits until the pipe that it shares with us ends, which it does however we die; then the whole group goes.
WARDEN: Final = 'read _; kill -s INT "$1"; sleep 5; kill -s KILL -- "-$1"; rm -rf "$2"'
# Without disable_any_whitespace a schema permits endless blanks, and xgrammar, the default backend, lets raw control
# characters into strings.
STRUCTURED: Final = '{"backend":"guidance","disable_any_whitespace":true}'
OFFLINE: Final[Mapping[str, str]] = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
# By default vLLM closes a connection after five idle seconds, and the next request may be sent just then.
KEEPS: Final[Mapping[str, str]] = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75"}
# Without it vLLM overrules `uni` on CPU: a process more to start.
UNI: Final[Mapping[str, str]] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
ADAPTERS: Final[Mapping[str, str]] = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


class ServerFailed(RuntimeError):
    """vLLM is not installed, or did not start or stop; the message holds the end of its log."""


class VllmServer(Struct, frozen=True):
    """A running server, and its address."""

    base_url: str
    model: str = MODEL


def build_model(directory: Path) -> Path:
    model = directory / "model"
    command = [str(PYTHON), str(Path(__file__).with_name("tiny_model.py")), str(model)]
    process = subprocess.run(
        command, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=120, check=False
    )
    if process.returncode:
        raise ServerFailed(f"the tiny model could not be built:\n{process.stderr[-LOG_TAIL:]}")
    manifest.describe(model, None, None, title="tiny")
    return model


def _command(model: Path, port: int) -> list[str]:
    """Eager mode saves a minute of compilation. The `vllm` command would fail: it looks for a package of that name."""
    options = {
        "--model": str(model),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": str(CONTEXT),
        "--kv-cache-memory-bytes": str(128 * 1024 * 1024),
        "--structured-outputs-config": STRUCTURED,
        # Weights as wild as these magnify what bfloat16 rounds off.
        "--dtype": "float32",
        "--max-loras": "4",
        "--max-lora-rank": str(RANK),
    }
    flags = [part for option in options.items() for part in option]
    return [
        str(PYTHON),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enforce-eager",
        "--enable-prefix-caching",
        "--enable-lora",
        "--served-model-name",
        MODEL,
        manifest.read(model)[0].name,
        *flags,
    ]


def _embedding(model: Path, port: int) -> list[str]:
    """The same model as a maker of embeddings: the last token's hidden state, brought to length 1."""
    options = {"--runner": "pooling", "--convert": "embed", "--max-model-len": str(CONTEXT), "--dtype": "float32"}
    options |= {"--kv-cache-memory-bytes": str(128 * 1024 * 1024), "--served-model-name": EMBEDDER}
    options |= {"--distributed-executor-backend": "uni"}
    flags = [part for option in options.items() for part in option]
    where = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    return [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *where, *flags]


def _serve_arguments(trained: Path, port: int) -> Arguments:
    """`baton conductor serve` for a small machine."""
    words = ["conductor", "serve", str(trained), "--adapters", "--rank", "16", "--port", str(port)]
    flags = ["--enforce-eager", "--kv-cache-memory-bytes", str(64 * 1024 * 1024)]
    return parse([*words, "--python", str(PYTHON), *(f"--flag={flag}" for flag in flags)])


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:]


def _answers(base_url: str) -> bool:
    """One constrained token, not /health: that is green before the first grammar, which takes seconds to load."""
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Are you there?"}],
        "max_tokens": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "ready", "schema": {"type": "object"}}},
    }
    try:
        reply = httpx.post(f"{base_url}/chat/completions", json=request, timeout=60, trust_env=False)
    except httpx.TransportError:
        return False
    return reply.status_code == httpx.codes.OK


def _embeds(base_url: str) -> bool:
    """One vector."""
    request = {"model": EMBEDDER, "input": "Are you there?"}
    try:
        reply = httpx.post(f"{base_url}/embeddings", json=request, timeout=60, trust_env=False)
    except httpx.TransportError:
        return False
    return reply.status_code == httpx.codes.OK


def _wait_until_ready(
    process: subprocess.Popen[bytes], answers: Callable[[], bool], log: Path, say: Callable[[str], None]
) -> None:
    started = time.monotonic()
    reported = started
    while not answers():
        now = time.monotonic()
        if process.poll() is not None:
            raise ServerFailed(f"vLLM exited with {process.returncode} while starting:\n{_tail(log)}")
        if now - started > START_SECONDS:
            raise ServerFailed(f"vLLM gave no answer in {START_SECONDS:.0f} s:\n{_tail(log)}")
        if now - reported > 15:
            reported = now
            say(f"vllm: starting, {now - started:.0f} s (30 to 100 s are normal)")
        time.sleep(LOOK_PAUSE)
    say(f"vllm: ready after {time.monotonic() - started:.0f} s")


def _group_is_alive(group: int) -> bool:
    """Zombies do not count: whether orphans are reaped is up to the machine's first process, not to vLLM."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _stop(process: subprocess.Popen[bytes], log: Path) -> None:
    """SIGINT to the parent lets it end its engine. What is left is killed, and is an error: it would be an orphan."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOP_SECONDS
    while (process.poll() is None or _group_is_alive(process.pid)) and time.monotonic() < deadline:
        time.sleep(LOOK_PAUSE)
    if _group_is_alive(process.pid):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise ServerFailed(f"vLLM left processes behind for {STOP_SECONDS:.0f} s; they were killed:\n{_tail(log)}")


@contextmanager
def _running(
    command: list[str], variables: Mapping[str, str], directory: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    # vLLM's own cache folder is kept out of the user's home.
    environment = os.environ | OFFLINE | KEEPS | variables | {"VLLM_CACHE_ROOT": str(directory / "cache")}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=sink, env=environment, cwd=directory, start_new_session=True
        )
    watch = ["sh", "-c", WARDEN, "warden", str(process.pid), str(directory)]
    with subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True) as warden:
        try:
            yield process
        finally:
            try:
                _stop(process, log)
            finally:
                warden.kill()


@contextmanager
def serve(say: Callable[[str], None], trained: Path | None = None, *, embeds: bool = False) -> Iterator[VllmServer]:
    """A server for the length of the block; `say` hears what it waits for, because starting takes up to minutes.

    `trained` is an exported conductor; without one, the tiny random model is served, or `embeds`.
    """
    if not PYTHON.exists():
        raise ServerFailed("vLLM's environment is missing; `make test-vllm` builds it")
    directory = Path(tempfile.mkdtemp(prefix="baton-vllm-"))
    try:
        port = free_port()
        if trained is None:
            say("vllm: building a tiny model")
            built = build_model(directory)
            command, variables = (_embedding if embeds else _command)(built, port), (UNI if embeds else ADAPTERS)
        else:
            command, variables = deployment.command(_serve_arguments(trained, port), read({}))
        base_url = f"http://127.0.0.1:{port}/v1"
        log = directory / "server.log"
        with _running(command, variables, directory, log) as process:
            _wait_until_ready(process, partial(_embeds if embeds else _answers, base_url), log, say)
            say(f"vllm: at {base_url}")
            yield VllmServer(base_url, EMBEDDER if embeds else MODEL)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
