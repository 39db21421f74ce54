"""`baton audit log`, `baton runs proof` and the check of `baton doctor`, over a log that a service has left."""

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

from app.core.transparency.notes import Signer
from app.store.sql import open_store
from tests.cli.test_commands import baton
from tests.conformance.entries import admitted
from tests.conformance.test_transparency_log import SIGNER, fresh


async def sealed(folder: Path, *signers: Signer) -> None:
    async with open_store(f"sqlite:///{folder}/baton.db") as store:
        await store.append(admitted("run_1"))
        while (done := await store.log.seal(signers, fresh)) is not None and done.more:
            pass


def test_the_log_and_the_proof_of_a_run_are_shown(tmp_path: Path) -> None:
    environ = {"BATON_DATABASE_URL": f"sqlite:///{tmp_path}/baton.db"}
    asyncio.run(sealed(tmp_path, SIGNER))
    state = json.loads(baton(tmp_path, "audit", "log", "--json", **environ).out)
    assert (state["origin"], state["size"], state["waiting"]) == ("log.example/baton", 2, 0)
    assert state["verifiers"] == [str(SIGNER.verifier)]
    assert "log.example/baton" in baton(tmp_path, "audit", "log", **environ).out
    assert "1 of 1 events are sealed." in baton(tmp_path, "runs", "proof", "run_1", **environ).out
    proof = json.loads(baton(tmp_path, "runs", "proof", "last", "--json", **environ).out)
    assert (proof["sealed"], proof["faults"], len(proof["leaves"])) == (1, [], 1)


def test_an_entry_that_was_changed_is_named(tmp_path: Path) -> None:
    environ = {"BATON_DATABASE_URL": f"sqlite:///{tmp_path}/baton.db"}
    asyncio.run(sealed(tmp_path, SIGNER))
    database = tmp_path / "baton.db"
    forged = """CAST(replace(entry, '"events":1', '"events":2') AS BLOB)"""
    change(database, f"UPDATE log_leaves SET entry = {forged} WHERE kind = 'run'")
    done = baton(tmp_path, "runs", "proof", "run_1", **environ)
    assert done.status == 1
    assert "Entry 1 is not in the tree of the checkpoint." in done.out


def change(database: Path, statement: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        assert connection.execute(statement).rowcount == 1


def test_a_key_is_made_and_not_stored(tmp_path: Path) -> None:
    done = baton(tmp_path, "audit", "log", "--new-key", "log.example/baton")
    signer = Signer.parsed(done.out.strip())
    assert str(signer.verifier) in done.err
    assert baton(tmp_path, "audit", "log", "--new-key", "two words").status == 2


def test_the_doctor_says_where_the_key_is(tmp_path: Path) -> None:
    environ = {"BATON_DATABASE_URL": f"sqlite:///{tmp_path}/baton.db"}
    asyncio.run(sealed(tmp_path))
    assert "log: sealed up to entry 1; the key that signs is stored in the database" in (
        baton(tmp_path, "doctor", **environ).out
    )
