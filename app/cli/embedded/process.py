"""The whole service in a child process of a command, with its own folder and a free port.

It is a process of its own so that its deadlines do not wait for a training step. It is called like any other service,
by HTTP and with a key.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from app.errors import ConfigInvalid

START_SECONDS = 60.0
STOP_SECONDS = 30.0
TAIL_CHARS = 2_000
SOURCE = Path(__file__).resolve().parents[3]


@contextmanager
def service_process(pool: str, environ: Mapping[str, str], *, runs: int) -> Iterator[tuple[str, str]]:
    """Yield URL and key of a service that carries out up to `runs` runs at a time, over the pool of this TOML text, or
    over the one that the environment names if the text is empty. It is stopped also where a SIGTERM ends this process,
    of which this must be the main thread."""
    with TemporaryDirectory(prefix="baton-") as place, _exit_on_sigterm():
        folder, key = Path(place), f"bt_training_{secrets.token_hex(16)}"
        variables = {
            **without_settings(environ),
            **_pool_variables(pool, environ, folder),
            "PYTHONPATH": _search_path(environ),
            "BATON_DATA_DIR": str(folder / "data"),
            "BATON_PORT": "0",
            "BATON_BOOTSTRAP_KEY": key,
            "BATON_CONCURRENT_RUNS": str(max(2 * runs, 64)),
            "BATON_LOG_LEVEL": "warning",
        }
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve"], cwd=folder, env=variables, stdout=log, stderr=log
            )
        try:
            yield _wait_for_url(process, folder / "log"), key
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let a SIGTERM raise SystemExit in the block, with the status of a process that it has ended."""

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without Baton's settings."""
    return {name: value for name, value in environ.items() if not name.startswith("BATON_")}


def _search_path(environ: Mapping[str, str]) -> str:
    """Return the search path for modules, with the folder of this package first."""
    others = environ.get("PYTHONPATH")
    if others:
        return f"{SOURCE}{os.pathsep}{others}"
    return str(SOURCE)


def _pool_variables(text: str, environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    if text:
        (folder / "pool.toml").write_text(text)
        return {"BATON_POOL": str(folder / "pool.toml")}
    path = environ.get("BATON_POOL")
    if not path:
        return {}
    return {"BATON_POOL": str(Path(path).resolve())}


def _wait_for_url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Wait until the service is ready, and return its URL."""
    mark, until = "Baton is listening on ", time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        _, _, text = log.read_text().partition(mark)
        if " " in text:  # the line has been written at least up to the end of the URL
            url = text.split()[0]
            if _is_ready(url):
                return url
        time.sleep(0.1)
    raise ConfigInvalid([f"the service that carries out plans could not be started: {log.read_text()[-TAIL_CHARS:]}"])


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
