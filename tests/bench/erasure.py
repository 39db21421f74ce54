"""Erasing all content of one end user among many runs, and looking for their words everywhere afterwards.

`python -m tests.bench.erasure [--runs 10000] [--database sqlite|postgres]` has a service carry out that many runs of
every kind, half of them in one user's name, erases that user's by `baton runs erase --user`, and counts the places that
still hold a word of theirs: rows of any table, the export of the journal, the log, `pg_dump`, and the database's files.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import logging
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import asyncpg
import httpx
from sqlalchemy import create_engine, select
from sqlalchemy.engine import make_url

from app.__main__ import main as main_of_baton
from app.process.wiring import Runtime
from app.store.sqlkit.migrate import migrate
from app.store.sqlkit.tables import METADATA
from tests.harness import processes, servers
from tests.harness.audited import audit_report
from tests.harness.in_process import client_of, pool_text, running_service
from tests.stubs import Echo, ProviderStub

ANN, BOB = "ann-7c1e55", "bob-93aa02"
"""The words that stand for a user: each is the user's name, and in each of their texts."""
AT_ONCE = 32
COMMAND_SECONDS = 600.0


@dataclass(slots=True)
class ErasureOutcome:
    """The places where a user's word was found, each with how often; none may be left."""

    erased: int
    places: dict[str, int]
    unverifiable: Mapping[str, int]
    """What the auditor could not verify, by reason."""
    violations: list[str]
    others: int
    """Rows that still hold the words of the user who was not erased."""
    seconds: float
    output: str
    """The words of the command that erased."""
    files: dict[str, int] = field(default_factory=dict)


def requests(user: str, number: int) -> list[tuple[str, dict[str, Any], dict[str, str]]]:
    """Return one request of each kind: path, body, headers."""
    text = f"{user} asks number {number}: what is 2 + 2?"
    chat = {"model": "baton-mini", "messages": [{"role": "user", "content": text}], "user": user}
    responses = {"model": "baton-mini", "input": text, "user": user, "metadata": {"note": text}, "instructions": text}
    anthropic = {"model": "baton-mini", "max_tokens": 50, "messages": [{"role": "user", "content": text}]}
    before = [{"role": "user", "content": text}, {"role": "assistant", "content": f"{user} hears this. " * 30}]
    once = {"Idempotency-Key": f"{'first' if user == ANN else 'second'}-{number}"}
    return [
        ("/v1/chat/completions", chat, {}),
        ("/v1/chat/completions", chat | {"stream": True}, once),
        ("/v1/chat/completions", chat | {"messages": before + chat["messages"]}, {}),
        ("/v1/responses", responses, {}),
        ("/v1/responses", responses | {"store": False}, {}),
        ("/v1/messages", anthropic | {"metadata": {"user_id": user}}, {}),
    ]


async def fill(runtime: Runtime, runs: int) -> None:
    """Have the service carry out that many runs, half of them in each user's name, and rate some."""
    gate = asyncio.Semaphore(AT_ONCE)
    async with client_of(runtime) as client, asyncio.TaskGroup() as group:
        for number in range(runs):
            user = (ANN, BOB)[number % 2]
            kinds = requests(user, number)
            group.create_task(_ask(client, gate, user, *kinds[number // 2 % len(kinds)]))


async def _ask(
    client: httpx.AsyncClient, gate: asyncio.Semaphore, user: str, path: str, body: dict[str, Any], more: dict[str, str]
) -> None:
    async with gate:
        reply = await client.post(path, json=body, headers=more)
        assert reply.status_code == 200, reply.text
        if path == "/v1/responses" and body.get("store") is not False:
            run = reply.json()["baton"]["run"]
            rating = {"score": 1.0, "comment": f"{user} likes it"}
            assert (await client.post(f"/v1/runs/{run}/feedback", json=rating)).status_code == 200
            cancelled = {"Idempotency-Key": f"cancel-{run}"}
            cancel = await client.post(f"/v1/responses/{reply.json()['id']}/cancel", json={}, headers=cancelled)
            assert cancel.status_code in (200, 400)


def rows_with(url: str, word: str) -> dict[str, int]:
    """Return the number of rows that hold a word, in every table that has any."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return asyncio.run(_postgres_rows_with(url, word))
    engine = create_engine(parsed)
    counted = {}
    with engine.connect() as conn:
        for table in METADATA.tables.values():
            rows = conn.execute(select(table)).all()
            counted[table.name] = sum(word.encode() in _bytes(row) for row in rows)
    engine.dispose()
    return {name: count for name, count in counted.items() if count}


async def _postgres_rows_with(url: str, word: str) -> dict[str, int]:
    connection = await asyncpg.connect(url)
    try:
        counted = {}
        for table in METADATA.tables:
            rows = await connection.fetch(f'SELECT * FROM "{table}"')
            counted[table] = sum(word.encode() in _bytes(tuple(row.values())) for row in rows)
    finally:
        await connection.close()
    return {name: count for name, count in counted.items() if count}


def _bytes(row: Any) -> bytes:
    return b"\0".join(bytes(value) if isinstance(value, bytes | memoryview) else str(value).encode() for value in row)


def files_with(folder: Path, word: str) -> dict[str, int]:
    """Return the files below a folder that hold a word, each with how often."""
    places = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (count := path.read_bytes().count(word.encode())):
            places[str(path.relative_to(folder))] = count
    return places


def in_export(folder: Path, environ: Mapping[str, str], word: str) -> int:
    """Return the number of lines of the journal's export that hold a word."""
    file = folder / "export.jsonl"
    command(environ, "audit", "export", str(file))
    counted = 0
    for line in file.read_bytes().splitlines():
        value = json.loads(line)
        body = base64.b64decode(value["body"]) if "content" in value else b""
        counted += word.encode() in line or word.encode() in body
    file.unlink()
    return counted


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Have everything that is logged written to a file as well."""
    handler = logging.FileHandler(path)
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


def command(environ: Mapping[str, str], *words: str) -> str:
    """Carry out a command in this process. Returns its output."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(out):
        status = main_of_baton(words, environ)
    assert status == 0, out.getvalue()
    return out.getvalue()


async def erase_one_of_two_users(folder: Path, url: str, runs: int) -> ErasureOutcome:
    """Carry out the runs, erase one user's, and look for their words in the rows, the export and the log."""
    log, log_of_command = folder / "service.log", folder / "command.log"
    environ = processes.environment(folder, BATON_DATABASE_URL=url, BATON_PEPPER="p" * 32)
    async with ProviderStub() as stub:
        stub.always("alpha", Echo("alpha", mirror=True))
        with log_to(log):
            async with running_service(folder, pool_text(stub), {"BATON_DATABASE_URL": url}) as runtime:
                await fill(runtime, runs)
                rows_held = await asyncio.to_thread(rows_with, url, ANN)
                assert {"contents", "texts", "feedback"} <= rows_held.keys(), rows_held
                started = time.monotonic()
                output = await asyncio.to_thread(command, environ, "runs", "erase", "--user", ANN)
                seconds = time.monotonic() - started
                files = files_with(folder / "data", ANN) if url.startswith("sqlite") else {}
    log_of_command.write_text(output)
    report = await audit_report(url)
    places = await asyncio.to_thread(rows_with, url, ANN)
    places |= {"export": await asyncio.to_thread(in_export, folder, environ, ANN)}
    places |= {path.name: path.read_bytes().count(ANN.encode()) for path in (log, log_of_command)}
    return ErasureOutcome(
        erased=report.unverifiable["erased"],
        places={name: count for name, count in places.items() if count},
        unverifiable=dict(report.unverifiable),
        violations=[str(violation) for violation in report.violations],
        others=sum((await asyncio.to_thread(rows_with, url, BOB)).values()),
        seconds=seconds,
        output=output.strip(),
        files=files,
    )


def _in_sqlite(folder: Path, runs: int) -> ErasureOutcome:
    (folder / "data").mkdir()
    return asyncio.run(erase_one_of_two_users(folder, f"sqlite:///{folder}/data/baton.db", runs))


def _in_postgres(folder: Path, runs: int) -> ErasureOutcome:
    with servers.postgres(settings=["autovacuum=off"]) as server:
        migrate(server.url)
        result = asyncio.run(erase_one_of_two_users(folder, server.url, runs))
        result.places |= {"pg_dump": _count_in_dump(server.url)}
        base = server.directory / "data" / "base"
        asyncio.run(_execute(server.url, "CHECKPOINT"))
        result.files["table files before VACUUM"] = sum(files_with(base, ANN).values())
        asyncio.run(_execute(server.url, "VACUUM", "CHECKPOINT"))
        result.files["table files after VACUUM"] = sum(files_with(base, ANN).values())
        asyncio.run(_execute(server.url, "VACUUM FULL", "CHECKPOINT"))
        result.files["table files after VACUUM FULL"] = sum(files_with(base, ANN).values())
        result.files["write-ahead log"] = sum(files_with(server.directory / "data" / "pg_wal", ANN).values())
    return result


def _count_in_dump(url: str) -> int:
    """Return how often a dump holds the user's word, as text or in the hexadecimal form of bytes."""
    program = shutil.which("pg_dump") or next(map(str, Path("/usr/lib/postgresql").glob("*/bin/pg_dump")))
    dump = subprocess.run([program, url], capture_output=True, check=True, timeout=COMMAND_SECONDS).stdout
    return dump.count(ANN.encode()) + dump.count(ANN.encode().hex().encode())


async def _execute(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


def main() -> None:
    """Print what was found, and exit with status 1 if a word of the user's is left where it must not be."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.erasure", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-erasure-") as folder:
        measured = (_in_sqlite if options.database == "sqlite" else _in_postgres)(Path(folder), options.runs)
    print(f"{options.runs:,} runs in {options.database}, half of them erased in {measured.seconds:.1f} s")
    print(f"the command said: {measured.output}")
    print(f"places that hold the erased user's words: {measured.places or 'none'}")
    print(f"files: {measured.files or 'none'}")
    print(f"rows that hold the other user's words: {measured.others:,}")
    print(f"audit: {len(measured.violations)} violations; unverifiable: {dict(measured.unverifiable)}")
    left = dict(measured.places)
    left |= measured.files if options.database == "sqlite" else {}
    raise SystemExit(1 if any(left.values()) or measured.violations else 0)


if __name__ == "__main__":
    main()
