"""`baton audit log`, `baton runs proof` and the check of `baton doctor`, over a log that a service has left."""

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from app.core.transparency.notes import Signer
from app.engine.log_export import file_name
from app.store.sql import open_store
from tests.cli.test_commands import baton
from tests.conformance.entries import admission_entry
from tests.conformance.test_transparency_log import SIGNER, new_salts
from tests.harness.log_authorities import NAME, LogAuthorities


async def seal_one_run(folder: Path, *signers: Signer) -> None:
    async with open_store(f"sqlite:///{folder}/baton.db") as store:
        await store.append(admission_entry("run_1"))
        while (sealing := await store.log.seal(signers, new_salts)) is not None and sealing.more:
            pass


async def begin_run(folder: Path, run: str) -> None:
    async with open_store(f"sqlite:///{folder}/baton.db") as store:
        await store.append(admission_entry(run))


def test_the_log_and_the_proof_of_a_run_are_shown(tmp_path: Path) -> None:
    environ = {"BATON_DATABASE_URL": f"sqlite:///{tmp_path}/baton.db"}
    asyncio.run(seal_one_run(tmp_path, SIGNER))
    state = json.loads(baton(tmp_path, "audit", "log", "--json", **environ).out)
    assert (state["origin"], state["size"], state["waiting"]) == ("log.example/baton", 2, 0)
    assert state["verifiers"] == [str(SIGNER.verifier)]
    log_text = baton(tmp_path, "audit", "log", **environ).out
    assert {"origin: log.example/baton", "catching_up: no", "export: -"} <= set(log_text.splitlines())
    assert "1 of 1 events are sealed." in baton(tmp_path, "runs", "proof", "run_1", **environ).out
    proof = json.loads(baton(tmp_path, "runs", "proof", "last", "--json", **environ).out)
    assert (proof["sealed"], proof["faults"], len(proof["leaves"])) == (1, [], 1)
    asyncio.run(begin_run(tmp_path, "run_2"))
    unproven = baton(tmp_path, "runs", "proof", "run_2", **environ)
    assert (unproven.status, "Nothing is proven" in unproven.out) == (1, True)
    assert baton(tmp_path, "runs", "proof", "run_2", "--json", **environ).status == 1


def test_tiles_are_not_written_below_a_file_and_the_database_is_not_blamed(tmp_path: Path) -> None:
    asyncio.run(seal_one_run(tmp_path, SIGNER))
    (tmp_path / "taken").write_text("a file")
    database = f"sqlite:///{tmp_path}/baton.db"
    result = baton(tmp_path, "audit", "tiles", str(tmp_path / "taken"), BATON_DATABASE_URL=database)
    assert (result.status, "taken" in result.err, "cannot be written" in result.err) == (2, True, True), result.err


def write_cosigned_copy(folder: Path, note: str) -> str:
    """Write checkpoints as an engine exports them, the second one without cosignature. Returns the witness's key."""
    served = LogAuthorities(SIGNER.verifier, folder)
    text, below = note.split("\n\n")
    exported = folder / "held"
    exported.mkdir()
    (exported / file_name(1)).write_text(note + served.line(text + "\n"))
    (exported / file_name(1, "tsr")).write_bytes(b"a token")
    (exported / file_name(2)).write_text(f"{text}\n\n{below}")
    return served.verifier


@pytest.mark.long
def test_the_export_is_shown_and_what_lacks_a_confirmation(tmp_path: Path) -> None:
    environ = {"BATON_DATABASE_URL": f"sqlite:///{tmp_path}/baton.db"}
    asyncio.run(seal_one_run(tmp_path, SIGNER))
    witness = write_cosigned_copy(tmp_path, asyncio.run(note_of(tmp_path)))
    exported = tmp_path / "held"
    environ |= {"BATON_LOG_EXPORT": str(exported), "BATON_LOG_WITNESS": f"http://127.0.0.1:1 {witness}"}
    environ |= {"BATON_LOG_TIMESTAMP_URL": "http://127.0.0.1:1"}
    state = json.loads(baton(tmp_path, "audit", "log", "--json", **environ).out)
    assert (state["exported_size"], state["timestamped_size"], state["export"]) == (2, 1, str(exported))
    assert state[f"witness {NAME}"]["size"] == 1
    assert f"not confirmed by {NAME}, the time-stamp authority" in " ".join(
        baton(tmp_path, "doctor", **environ).out.split()
    )
    newest, earlier = str(exported / file_name(2)), str(exported / file_name(1))
    assert baton(tmp_path, "audit", "verify", "--checkpoint", earlier, "--witness", witness, **environ).status == 0
    refused = baton(tmp_path, "audit", "verify", "--checkpoint", newest, "--witness", witness, **environ)
    assert refused.status == 1
    assert f"the newest held checkpoint is not cosigned by {NAME}" in refused.out


async def note_of(folder: Path) -> str:
    async with open_store(f"sqlite:///{folder}/baton.db") as store:
        return (await store.log.state()).checkpoint or ""


def test_an_entry_that_was_changed_is_named(tmp_path: Path) -> None:
    environ = {"BATON_DATABASE_URL": f"sqlite:///{tmp_path}/baton.db"}
    asyncio.run(seal_one_run(tmp_path, SIGNER))
    database = tmp_path / "baton.db"
    forged = """CAST(replace(entry, '"events":1', '"events":2') AS BLOB)"""
    change(database, f"UPDATE log_leaves SET entry = {forged} WHERE kind = 'run'")
    result = baton(tmp_path, "runs", "proof", "run_1", **environ)
    assert result.status == 1
    assert "Entry 1 is not in the tree of the checkpoint." in result.out
    assert "0 of 1 events are sealed." in result.out


@pytest.mark.parametrize(
    "entry",
    [b'{"v":1}', b'{"v":1,"t":"run","id":"run_1","at":null}', b"[1]", b"\xff"],
    ids=["a field is missing", "a field has another type", "no object", "no text"],
)
def test_an_entry_in_another_form_is_named(tmp_path: Path, entry: bytes) -> None:
    environ = {"BATON_DATABASE_URL": f"sqlite:///{tmp_path}/baton.db"}
    asyncio.run(seal_one_run(tmp_path, SIGNER))
    change(tmp_path / "baton.db", f"UPDATE log_leaves SET entry = x'{entry.hex()}' WHERE kind = 'run'")
    result = baton(tmp_path, "runs", "proof", "run_1", **environ)
    assert (result.status, "Entry 1 is malformed" in result.out) == (1, True)
    proof = json.loads(baton(tmp_path, "runs", "proof", "run_1", "--json", **environ).out)
    assert (proof["sealed"], len(proof["faults"])) == (0, 1)


def test_without_the_hashes_of_the_log_there_is_no_proof_and_it_says_so(tmp_path: Path) -> None:
    environ = {"BATON_DATABASE_URL": f"sqlite:///{tmp_path}/baton.db"}
    asyncio.run(seal_one_run(tmp_path, SIGNER))
    change(tmp_path / "baton.db", "DELETE FROM log_tiles")
    result = baton(tmp_path, "runs", "proof", "run_1", **environ)
    assert (result.status, "Hashes of the log are missing" in result.err) == (2, True)


@pytest.mark.long
def test_a_stored_checkpoint_that_is_none_is_named_and_a_log_without_entries_has_no_key(tmp_path: Path) -> None:
    environ = {"BATON_DATABASE_URL": f"sqlite:///{tmp_path}/baton.db"}
    assert baton(tmp_path, "migrate", **environ).status == 0
    assert json.loads(baton(tmp_path, "audit", "log", "--json", **environ).out)["key"] is None
    asyncio.run(seal_one_run(tmp_path, SIGNER))
    assert json.loads(baton(tmp_path, "audit", "log", "--json", **environ).out)["key"] == "BATON_LOG_KEY"
    change(tmp_path / "baton.db", "UPDATE log_state SET checkpoint = 'another'")
    for command in (("audit", "log"), ("runs", "proof", "run_1")):
        result = baton(tmp_path, *command, **environ)
        assert (result.status, "is not valid" in result.err) == (2, True)


@pytest.mark.parametrize("name", ["run_1", "1", "chatcmpl-run_1", "resp_run_1"])
def test_a_pruned_run_is_proven_by_every_name_of_it(tmp_path: Path, name: str) -> None:
    environ = {"BATON_DATABASE_URL": f"sqlite:///{tmp_path}/baton.db"}
    asyncio.run(seal_one_run(tmp_path, SIGNER))
    columns = "id, tenant, state, created_at, ended_at, pruned_at, events, root, archive"
    values = "'run_1', 'tenant', 'failed', 1, 2, 3, 1, x'00', ''"
    change(tmp_path / "baton.db", f"INSERT INTO pruned_runs ({columns}) VALUES ({values})")
    change(tmp_path / "baton.db", "DELETE FROM runs")
    proof = baton(tmp_path, "runs", "proof", name, **environ)
    assert (proof.status, "The run was pruned." in proof.out) == (0, True)


def change(database: Path, statement: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        assert connection.execute(statement).rowcount == 1


def test_a_key_is_made_and_not_stored(tmp_path: Path) -> None:
    result = baton(tmp_path, "audit", "log", "--new-key", "log.example/baton")
    signer = Signer.parse(result.out.strip())
    assert str(signer.verifier) in result.err
    assert baton(tmp_path, "audit", "log", "--new-key", "two words").status == 2


def test_the_doctor_says_where_the_key_is(tmp_path: Path) -> None:
    environ = {"BATON_DATABASE_URL": f"sqlite:///{tmp_path}/baton.db"}
    asyncio.run(seal_one_run(tmp_path))
    assert "log: sealed up to entry 1; the key that signs is stored in the database" in (
        baton(tmp_path, "doctor", **environ).out
    )
