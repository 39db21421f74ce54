"""Contents encrypted at rest: what the database holds, what readers see, and what becomes of it without a key."""

import asyncio
import base64
import json
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, func, select

from app.__main__ import main
from app.cli.retention import erase
from app.core.contents import content_ref
from app.core.transparency.notes import Signer
from app.errors import StoreUnavailable
from app.store.archive import open_archive
from app.store.protocol import ContentQuery, Entry
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.tables import CONTENTS, METADATA, TEXTS
from app.store.writing import tenant_keys
from tests.conformance.conversations import contents_of, converse
from tests.conformance.entries import SALT, admission_entry

FIRST, SECOND = os.urandom(32), os.urandom(32)
BODY = b"a secret of the tenant " * 20
REF = content_ref(SALT, BODY)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.integration)])
def url(request: pytest.FixtureRequest, tmp_path: Path, make_schema: Callable[[str], None]) -> str:
    """The URL of an empty database with the schema in it."""
    if request.param == "postgres":
        return str(request.getfixturevalue("migrated_postgres_url"))
    make_schema(f"sqlite:///{tmp_path}/baton.db")
    return f"sqlite:///{tmp_path}/baton.db"


async def raw(store: SqlStore) -> bytes:
    """Return the bytes of all tables."""

    def work(conn: Connection) -> bytes:
        rows = [row for table in METADATA.tables.values() for row in conn.execute(select(table))]
        return b" ".join(bytes(value) for row in rows for value in row if isinstance(value, bytes | memoryview))

    return await store._read(work)


def run_of(name: str, tenant: str = "tenant") -> Entry:
    return replace(admission_entry(name, tenant=tenant), contents=((REF, BODY),))


@pytest.mark.long
async def test_contents_are_encrypted_in_the_database_and_read_as_they_were(url: str) -> None:
    async with open_store(url) as store:
        await store.append(run_of("plain"))
    async with open_store(url, content_keys=[FIRST]) as store:
        await store.append(run_of("ours"))
        await store.append(replace(run_of("theirs", "other")))
        assert (await raw(store)).count(BODY) == 1, "what was stored before is plain"
    async with open_store(url, content_keys=[FIRST]) as store:
        for run in ("plain", "ours", "theirs"):
            assert await store.contents(run, [REF]) == {REF: BODY}
            assert (await store.step_input(run)).contents == {REF: BODY}


@pytest.mark.long
async def test_a_conversation_is_shared_as_before(url: str) -> None:
    async with open_store(url, content_keys=[FIRST]) as store:
        runs = await converse(store, 3)
        assert b"Question" not in await raw(store)
        texts = await store._read(lambda conn: conn.execute(select(func.count()).select_from(TEXTS)).scalar_one())
        assert texts == 7, "the second and third turn add two texts each to those of the first, and one is of tools"
    async with open_store(url, content_keys=[FIRST]) as store:
        for turns, run in enumerate(runs, 1):
            contents = contents_of(run, turns)
            assert await store.contents(run, list(contents)) == contents
        theirs = await store.runs_with_content(ContentQuery(user="ann"))
        assert [row.id for row in theirs.runs] == runs
        assert await store.erase_contents(runs) == 3
        assert b"Question" not in await raw(store)


async def test_without_the_master_key_the_error_names_the_setting(url: str) -> None:
    async with open_store(url, content_keys=[FIRST]) as store:
        await store.append(run_of("ours"))
    async with open_store(url) as store:
        with pytest.raises(StoreUnavailable, match="set BATON_CONTENT_KEYS"):
            await store.contents("ours", [REF])
    async with open_store(url, content_keys=[SECOND]) as store:
        with pytest.raises(StoreUnavailable, match="not in BATON_CONTENT_KEYS"):
            await store.contents("ours", [REF])


async def test_the_master_key_is_changed_without_a_change_of_contents(url: str) -> None:
    stored = select(CONTENTS.c.body)
    async with open_store(url, content_keys=[FIRST]) as store:
        await store.append(run_of("ours"))
        before = await store._read(lambda conn: conn.execute(stored).scalar_one())
    async with open_store(url, content_keys=[SECOND, FIRST]) as store:
        assert await store.contents("ours", [REF]) == {REF: BODY}
        assert await store.rewrap_content_keys() == (1, 1)
        assert await store.rewrap_content_keys() == (1, 0)
        assert await store._read(lambda conn: conn.execute(stored).scalar_one()) == before
    async with open_store(url, content_keys=[SECOND]) as store:
        assert await store.contents("ours", [REF]) == {REF: BODY}


async def test_a_destroyed_key_erases_what_was_encrypted_under_it(url: str) -> None:
    async with open_store(url, content_keys=[FIRST]) as store:
        await store.append(run_of("ours"))
        await store.append(run_of("theirs", "other"))
        assert await store.retire_content_keys("tenant", 5.0) > 0
        assert await store.retire_content_keys("tenant", 6.0) > 0, "after an erasure that was interrupted"
        await store.append(run_of("later"))
        assert await store.destroy_content_keys("tenant") == 1
        assert await store.retire_content_keys("nobody", 5.0) == 0
    async with open_store(url, content_keys=[FIRST]) as store:
        assert await store.contents("ours", [REF]) == {}
        for run in ("theirs", "later"):
            assert await store.contents(run, [REF]) == {REF: BODY}


async def test_a_content_in_the_place_of_another_is_not_accepted(url: str) -> None:
    async with open_store(url, content_keys=[FIRST]) as store:
        await store.append(run_of("ours"))
        await store.append(replace(admission_entry("other"), contents=(("ref", b"x" * 9),)))

        def swap(conn: Connection) -> None:
            body = conn.execute(select(CONTENTS.c.body).where(CONTENTS.c.run == "ours")).scalar_one()
            conn.execute(CONTENTS.update().where(CONTENTS.c.run == "other").values(body=body))

        await store._write(swap)
    async with open_store(url, content_keys=[FIRST]) as store:
        assert await store.contents("other", ["ref"]) == {}


async def test_the_auditor_reads_with_the_key(url: str) -> None:
    async with open_store(url, content_keys=[FIRST]) as store:
        await store.append(run_of("ours"))
    async with open_archive(url, [FIRST]) as archive:
        assert [dict(record.contents) async for record in archive.records()] == [{REF: BODY}]
    async with open_archive(url) as archive:
        with pytest.raises(StoreUnavailable, match="set BATON_CONTENT_KEYS"):
            [record async for record in archive.records()]


def test_the_commands_read_erase_and_rewrap_with_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runs erase --tenant` destroys the tenant's key; here nobody else writes, so that it need not wait."""
    monkeypatch.setattr(tenant_keys, "FOLLOW_SECONDS", 0.0)
    monkeypatch.setattr(erase, "END_SECONDS", -4.0)  # with the lease no time for open runs to end: nobody drives them
    url = f"sqlite:///{tmp_path}/baton.db"
    key, other = (base64.b64encode(content_key).decode() for content_key in (FIRST, SECOND))
    environ = {"BATON_DATA_DIR": str(tmp_path), "BATON_CONTENT_KEYS": key}

    async def fill() -> None:
        async with open_store(url, content_keys=[FIRST]) as store:
            await store.append(run_of("ours"))
            await store.append(run_of("theirs", "other"))

    asyncio.run(fill())
    with redirect_stdout(StringIO()) as out:
        assert main(["audit", "export", str(tmp_path / "export")], environ) == 0
        assert main(["runs", "erase", "--tenant", "tenant", "--json"], environ) == 0
        assert main(["content-keys", "rewrap"], environ | {"BATON_CONTENT_KEYS": f"{other}\n{key}"}) == 0
    assert base64.b64encode(BODY).decode() in (tmp_path / "export").read_text()
    assert "1 of 1 content keys were encrypted anew" in out.getvalue(), "the other tenant's is left"
    with redirect_stderr(StringIO()) as errors:
        assert main(["runs", "ls"], environ | {"BATON_CONTENT_KEYS": "short"}) == 2
    assert "BATON_CONTENT_KEYS" in errors.getvalue()
    assert "openssl rand -base64 32" in errors.getvalue()


@pytest.mark.parametrize("line", ["audit check", "audit verify", "audit export FILE"])
def test_a_command_without_the_master_key_says_which_setting_it_needs(tmp_path: Path, line: str) -> None:
    url = f"sqlite:///{tmp_path}/baton.db"

    async def fill() -> None:
        async with open_store(url, content_keys=[FIRST]) as store:
            await store.append(run_of("ours"))
            await store.log.seal([Signer("log.example/baton", SECOND)], lambda: bytes(16))

    asyncio.run(fill())
    with redirect_stderr(StringIO()) as errors:
        status = main(line.replace("FILE", str(tmp_path / "export")).split(), {"BATON_DATA_DIR": str(tmp_path)})
    assert status in (1, 2)
    assert "The content is encrypted; set BATON_CONTENT_KEYS" in errors.getvalue()


def test_without_texts_the_log_is_verified_without_the_master_key(tmp_path: Path) -> None:
    async def fill() -> None:
        async with open_store(f"sqlite:///{tmp_path}/baton.db", content_keys=[FIRST]) as store:
            await store.append(run_of("ours"))
            await store.log.seal([Signer("log.example/baton", SECOND)], lambda: bytes(16))

    asyncio.run(fill())
    with redirect_stdout(StringIO()) as out:
        assert main(["audit", "verify", "--no-contents"], {"BATON_DATA_DIR": str(tmp_path)}) == 0
    assert "Nothing that was sealed is altered or missing." in out.getvalue()


class FakeKms(BaseHTTPRequestHandler):
    """The two operations of AWS KMS that Baton uses, as JSON over HTTP: a ciphertext is its plaintext and context."""

    def do_POST(self) -> None:
        """Answer one request."""
        request_body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        context = json.dumps(request_body["EncryptionContext"])
        status, answer = 200, {}
        if self.headers["x-amz-target"] == "TrentService.Encrypt":
            sealed = json.dumps([request_body["KeyId"], request_body["Plaintext"], context]).encode()
            answer = {"KeyId": request_body["KeyId"], "CiphertextBlob": base64.b64encode(sealed).decode()}
        else:
            key, plaintext, bound = json.loads(base64.b64decode(request_body["CiphertextBlob"]))
            answer = {"KeyId": key, "Plaintext": plaintext}
            if (key, bound) != (request_body["KeyId"], context):
                status, answer = 400, {"__type": "InvalidCiphertextException"}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_words: object) -> None:
        """Say nothing."""


@pytest.fixture
def kms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A KMS that botocore finds."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeKms)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", f"http://127.0.0.1:{server.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    yield
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.usefixtures("kms")
@pytest.mark.long
async def test_a_master_key_may_be_in_a_key_management_service(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/baton.db"
    async with open_store(url, content_keys=["aws-kms:alias/baton"]) as store:
        await store.append(run_of("ours"))
    async with open_store(url, content_keys=[FIRST, "aws-kms:alias/baton"]) as store:
        assert await store.contents("ours", [REF]) == {REF: BODY}
        assert await store.rewrap_content_keys() == (1, 1)
    async with open_store(url, content_keys=[FIRST]) as store:
        assert await store.contents("ours", [REF]) == {REF: BODY}


@pytest.mark.long
async def test_a_key_management_service_that_is_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://127.0.0.1:1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    async with open_store(f"sqlite:///{tmp_path}/baton.db", content_keys=["aws-kms:alias/baton"]) as store:
        with pytest.raises(StoreUnavailable, match="alias/baton of AWS KMS cannot be used"):
            await store.append(run_of("ours"))
