"""A whole Baton of a command's own: a process over a folder of its own, on a free port, for as long as it is needed.

It runs beside what the command does, so that its deadlines do not wait for a training step; and it is reached like any
other Baton, by HTTP and a key.
"""

import os
import secrets
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
TAIL = 2_000
SOURCE = Path(__file__).resolve().parents[2]


@contextmanager
def baton(pool: str, environ: Mapping[str, str], *, runs: int) -> Iterator[tuple[str, str]]:
    """URL and key of a Baton which drives up to `runs` runs at a time: over the pool of this TOML text, or, where it is
    empty, over the one that the environment names."""
    with TemporaryDirectory(prefix="baton-") as place:
        folder, key = Path(place), f"bt_training_{secrets.token_hex(16)}"
        asked = {
            **{name: value for name, value in environ.items() if not name.startswith("BATON_")},
            **_pool(pool, environ, folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCE), environ.get("PYTHONPATH")])),
            "BATON_DATA_DIR": str(folder / "data"),
            "BATON_PORT": "0",
            "BATON_BOOTSTRAP_KEY": key,
            "BATON_CONCURRENT_RUNS": str(max(2 * runs, 64)),
            "BATON_LOG_LEVEL": "warning",
        }
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve"], cwd=folder, env=asked, stdout=log, stderr=log
            )
        try:
            yield _url(process, folder / "log"), key
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _pool(text: str, environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    if text:
        (folder / "pool.toml").write_text(text)
        return {"BATON_POOL": str(folder / "pool.toml")}
    named = environ.get("BATON_POOL")
    return {"BATON_POOL": str(Path(named).resolve())} if named else {}


def _url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Where it listens, once it is ready."""
    mark, until = "Baton is listening on ", time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        _, found, rest = log.read_text().partition(mark)
        if found and " " in rest and _ready(url := rest.split()[0]):
            return url
        time.sleep(0.1)
    raise ConfigInvalid([f"a Baton to carry plans out could not be started: {log.read_text()[-TAIL:]}"])


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
