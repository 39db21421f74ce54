"""`python -m tests.bench.go_verifier`: Go's own checker of transparency logs accepts Baton's.

Seals some runs, writes the checkpoint, the tiles and the bundles of entries to a folder as they are served, and has a
program over `golang.org/x/mod/sumdb` (`tlog` and `note`, the code of the Go checksum database) check the signature, the
tiles, every entry and the consistency of fifty earlier trees. Then one entry is changed, which it must refuse.

Needs Go and its module: on Debian `apt-get install golang-go golang-golang-x-mod-dev`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from app.core.transparency.merkle import HASH_BYTES
from app.core.transparency.notes import Signer
from app.core.transparency.tiles import bundle, tiles_of
from app.store.sql import SqlStore, open_store
from tests.bench.sealing import write

RUNS = 700
SIGNER = Signer("log.example/baton", bytes(range(32)))
PROGRAM = Path(__file__).parent / "tlog_verifier" / "main.go"


async def export(folder: Path) -> None:
    """Seal runs, and write the log to a folder."""
    async with open_store(f"sqlite:///{folder}/baton.db") as store:
        for start in range(0, RUNS, 50):
            await write(store, [f"run_{number:05d}" for number in range(start, start + 50)])
        while (sealed := await store.log.seal([SIGNER], lambda: os.urandom(16))) is not None and sealed.more:
            pass
        await write_out(store, folder)


async def write_out(store: SqlStore, folder: Path) -> None:
    """Write the checkpoint, the tiles and the bundles of entries to a folder."""
    state = await store.log.state()
    assert state.checkpoint is not None
    (folder / "checkpoint").write_text(state.checkpoint)
    for tile in tiles_of(state.size):
        path = folder / tile.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if tile.level is None:
            path.write_bytes(bundle((await store.log.entries(tile.number))[: tile.width]))
        else:
            path.write_bytes((await store.log.tile(tile.level, tile.number))[: tile.width * HASH_BYTES])


def verify(folder: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOCACHE": str(folder / "cache")}
    command = ["go", "run", str(PROGRAM), str(folder), str(SIGNER.verifier)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asyncio.run(export(folder))
        good = verify(folder)
        print(good.stdout + good.stderr, end="")
        first = folder / "tile" / "entries" / "000"
        first.write_bytes(first.read_bytes().replace(b'"events":7', b'"events":8', 1))
        bad = verify(folder)
        print("after one entry was changed:", bad.stderr.strip() or bad.stdout.strip())
    return 0 if good.returncode == 0 and bad.returncode != 0 else 1


if __name__ == "__main__":
    sys.exit(main())
