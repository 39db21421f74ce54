"""`baton doctor` against providers that answer, refuse the key, limit, and refuse to be brief."""

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import make_url

from app.cli.operations import doctor_checks
from app.network import log_authorities
from app.process.config import configure
from app.store.sqlkit import revisions
from tests.cli.test_commands import Done, baton
from tests.harness import servers
from tests.stubs import KEYS, Fail, ProviderStub, Reply


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running_stub:
        yield running_stub


async def doctor(folder: Path, stub: ProviderStub, key: str = KEYS["openai"]) -> Done:
    """The command, with OpenAI at the stub."""
    environ = {"OPENAI_API_KEY": key, "OPENAI_BASE_URL": stub.openai_url}
    return await asyncio.to_thread(lambda: baton(folder, "doctor", **environ))


async def test_a_good_key_answers_one_token(tmp_path: Path, stub: ProviderStub) -> None:
    result = await doctor(tmp_path, stub)
    assert result.status == 0, result.out
    assert "ok    provider openai: openai/" in result.out
    assert "ok    conductor of baton-ultra: openai/" in result.out
    assert "fraction of a cent" in result.err
    assert len(stub.requests) == 2


def test_workers_of_unknown_price_are_named(tmp_path: Path) -> None:
    pool = tmp_path / "pool.toml"
    pool.write_text(
        '[providers.house]\nformat = "openai"\nbase_url = "http://127.0.0.1:9/v1"\n'
        '[workers.house]\nprovider = "house"\nmodel = "m"\n'
        '[workers.free]\nprovider = "house"\nmodel = "n"\nprice = { input = 0, output = 0 }\n'
        '[tiers.mini]\npool = "all"\nfallback = "house"\nconductor = { kind = "fixed", shape = "single" }\n'
    )
    verdicts = doctor_checks.check_settings(configure({"BATON_POOL": str(pool)}), {})
    [words] = [verdict.words for verdict in verdicts if verdict.name == "prices"]
    assert words.startswith("no price is known of house: not called for a request, key or tenant that has a budget")
    names = [verdict.name for verdict in doctor_checks.check_settings(configure({}), {}) if verdict.name != "note"]
    assert "prices" not in names
    assert len(set(names)) == len(names), "each check has a name of its own"


FAILURES_OF_SETTINGS = [
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "tracing", "OTEL_EXPORTER_OTLP_ENDPOINT is not an HTTP URL"),
    (
        {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "collector:4318/v1/metrics"},
        "tracing",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT is not an HTTP URL",
    ),
    ({"BATON_LOG_EXPORT": "/dev/null/log"}, "log export", "/dev/null is no folder"),
    ({"BATON_ARCHIVE": "/dev/null/archive"}, "archive", "/dev/null is no folder"),
]


@pytest.mark.parametrize(("environ", "name", "words"), FAILURES_OF_SETTINGS)
def test_settings_that_only_fail_when_they_are_used_are_told(environ: dict[str, str], name: str, words: str) -> None:
    verdicts = doctor_checks.check_settings(configure(environ), environ)
    [failure] = [verdict for verdict in verdicts if verdict.status == "fail"]
    assert (failure.name, words in failure.words) == (name, True), failure


def test_a_class_of_retention_that_no_present_tier_has_is_told() -> None:
    environ = {"BATON_RETENTION_CLASSES": "tier=mini=>content=7; tier=baton-mini=>content=7; tenant=a=>content=7"}
    verdicts = doctor_checks.check_settings(configure(environ), {})
    (note,) = [verdict.words for verdict in verdicts if "RETENTION_CLASSES names" in verdict.words]
    assert "the tier mini, which the pool file does not have" in note, "it is an alias alone"


def test_a_database_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    verdict = doctor_checks.missing_database(configure({"BATON_DATABASE_URL": "sqlite:////dev/null/baton.db"}))
    assert (verdict.status, "/dev/null is no folder" in verdict.words) == ("fail", True)
    verdict = doctor_checks.missing_database(configure({"BATON_DATABASE_URL": f"sqlite:///{tmp_path}"}))
    assert (verdict.status, "is no file" in verdict.words) == ("fail", True)
    verdict = doctor_checks.missing_database(configure({"BATON_DATABASE_URL": f"sqlite:///{tmp_path}/new/baton.db"}))
    assert verdict.status == "skip"


@pytest.mark.parametrize("query", ["db=x", "foo=bar", "socket_timeout=abc"])
def test_a_parameter_that_no_client_of_redis_knows_is_told(tmp_path: Path, query: str) -> None:
    result = baton(tmp_path, "doctor", BATON_REDIS_URL=f"redis://127.0.0.1:1?{query}")
    assert result.status == 1
    assert "BATON_REDIS_URL: has a parameter that the client of Redis does not take; correct it" in result.out


def test_a_missing_library_for_time_stamps_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_authorities, "find_spec", lambda name: None)
    config = configure({"BATON_LOG_EXPORT": "log", "BATON_LOG_TIMESTAMP_URL": "http://127.0.0.1:9"})
    [failure] = [verdict for verdict in doctor_checks.check_settings(config, {}) if verdict.status == "fail"]
    assert failure.words.startswith("BATON_LOG_TIMESTAMP_URL: needs rfc3161-client; install it with")


async def test_a_newer_schema_is_told_apart_from_a_server_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = "the database is newer than this program: it has revision 0099, this program 0033"
    monkeypatch.setattr(revisions, "has_undeclared_pooling", lambda url: False)
    monkeypatch.setattr(revisions, "cause", lambda url: cause)
    [verdict] = await doctor_checks.check_schema(configure({"BATON_DATABASE_URL": "postgresql://baton@db/baton"}))
    assert (verdict.status, cause in verdict.words) == ("fail", True)
    assert verdict.remedy.startswith("use the release that has migrated the database")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("pooling", "declared", "status"),
    [("transaction", "", "fail"), ("transaction", "?pgbouncer=transaction", "ok"), ("session", "", "ok")],
)
async def test_a_pgbouncer_that_pools_transactions_without_the_urls_saying_so_is_a_failure(
    migrated_postgres_url: str, pooling: str, declared: str, status: str
) -> None:
    if servers.pgbouncer_binary() is None:
        pytest.skip("PgBouncer is not installed (Debian's package pgbouncer), and no wheel brings it")
    with servers.pgbouncer(migrated_postgres_url, pooling, connections=4) as server:
        verdicts = await doctor_checks.check_schema(configure({"BATON_DATABASE_URL": server.url + declared}))
    assert verdicts[0].status == status
    assert ("add `pgbouncer=transaction` to the parameters" in verdicts[0].remedy) is (status == "fail")


async def test_every_worker_is_asked_where_that_is_wanted(tmp_path: Path, stub: ProviderStub) -> None:
    environ = {"OPENAI_API_KEY": KEYS["openai"], "OPENAI_BASE_URL": stub.openai_url}
    result = await asyncio.to_thread(lambda: baton(tmp_path, "doctor", "--all", "--json", **environ))
    verdicts = json.loads(result.out)
    verdict_names = {
        verdict["name"] for verdict in verdicts if verdict["name"].startswith(("worker ", "conductor of "))
    }
    models = {json.loads(request.body)["model"] for request in stub.requests}
    assert result.status == 0
    assert len(verdict_names) == len(models) == len(stub.requests) > 2
    assert {verdict["status"] for verdict in verdicts} == {"ok", "skip"}


async def test_a_bad_key_is_named_by_its_variable_and_never_shown(tmp_path: Path, stub: ProviderStub) -> None:
    result = await doctor(tmp_path, stub, "sk-not-this-one")
    assert result.status == 1
    assert "fail  provider openai" in result.out
    assert "check the key in OPENAI_API_KEY" in result.out
    assert "sk-not-this-one" not in result.out + result.err


async def test_a_limited_key_is_a_good_one(tmp_path: Path, stub: ProviderStub) -> None:
    stub.always("*", Fail(status=429))
    result = await doctor(tmp_path, stub)
    assert result.status == 0, result.out
    assert "limits requests at the moment" in result.out


async def test_a_model_that_cannot_be_so_brief_is_asked_again(tmp_path: Path, stub: ProviderStub) -> None:
    for model in ("gpt-6-astra", "gpt-6-luna"):
        stub.script(model, Fail(status=400), Reply())
    result = await doctor(tmp_path, stub)
    assert result.status == 0, result.out
    assert len(stub.requests) == 4


async def test_a_provider_that_fails_is_told_apart_from_a_bad_key(tmp_path: Path, stub: ProviderStub) -> None:
    stub.always("*", Fail(status=503))
    result = await doctor(tmp_path, stub)
    assert result.status == 1
    assert "can be reached from here" in result.out
    assert "send the request again" not in result.out, "that is for callers"
    assert "OPENAI_API_KEY" not in result.out


@pytest.mark.integration
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--maxmemory-policy", "allkeys-lru"], "may evict tickets (maxmemory-policy allkeys-lru)"),
        (["--maxmemory", "1", "--maxmemory-policy", "noeviction"], "out of memory"),
        (["--requirepass", "another"], "refuses the user or the password of BATON_REDIS_URL"),
    ],
)
async def test_a_redis_that_is_reached_but_of_no_use_is_told_apart_from_one_that_is_away(
    tmp_path: Path, stub: ProviderStub, settings: list[str], words: str
) -> None:
    with servers.redis(settings=settings) as redis:
        environ = {"OPENAI_API_KEY": KEYS["openai"], "OPENAI_BASE_URL": stub.openai_url, "BATON_REDIS_URL": redis.url}
        result = await asyncio.to_thread(lambda: baton(tmp_path, "doctor", **environ))
    assert result.status == 1
    assert "Redis" in result.out
    assert words in result.out
    assert "cannot be reached" not in result.out


def test_a_redis_that_is_away_is_shown_with_the_cause(tmp_path: Path) -> None:
    result = baton(tmp_path, "doctor", BATON_REDIS_URL="redis://127.0.0.1:1/0")
    assert result.status == 1
    assert "fail  redis: it cannot be reached (Error 111 connecting to 127.0.0.1:1." in result.out


@pytest.mark.long
async def test_a_user_who_may_not_write_is_told_what_the_database_says(
    migrated_postgres_url: str, tmp_path: Path
) -> None:
    """The server answers and has all tables; "it did not answer" sent operators to look at the network."""
    admin_url = make_url(migrated_postgres_url).set(drivername="postgresql")
    reader_url = admin_url.set(username=f"reader_{uuid.uuid4().hex[:8]}").render_as_string(hide_password=False)
    user = make_url(reader_url).username
    admin = await asyncpg.connect(admin_url.render_as_string(hide_password=False))
    await admin.execute(f"CREATE ROLE {user} LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {user}")
    try:
        added = await asyncio.to_thread(baton, tmp_path, "keys", "add", "x", BATON_DATABASE_URL=reader_url)
        doctor = await asyncio.to_thread(baton, tmp_path, "doctor", BATON_DATABASE_URL=reader_url)
    finally:
        await admin.execute(f"DROP OWNED BY {user}; DROP ROLE {user}")
        await admin.close()
    refusal = "(InsufficientPrivilegeError: permission denied for table"
    assert (added.status, doctor.status) == (1, 1)
    assert f"it did not carry this out {refusal}" in added.err
    assert f"does not take writes {refusal}" in doctor.out
    assert "that its user may write to every table" in doctor.out


@pytest.mark.long
def test_contents_that_nobody_can_read_with_these_master_keys_are_a_failure(tmp_path: Path) -> None:
    """Whatever needs them is a 503, while everything else works."""
    first, second = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))
    assert baton(tmp_path, "migrate", BATON_CONTENT_KEYS=first).status == 0
    assert baton(tmp_path, "plans", "make", "What is 17 * 23?", BATON_CONTENT_KEYS=first).status == 0
    good = baton(tmp_path, "doctor", BATON_CONTENT_KEYS=first)
    wrong = baton(tmp_path, "doctor", BATON_CONTENT_KEYS=second)
    without = baton(tmp_path, "doctor")
    assert (good.status, wrong.status, without.status) == (0, 1, 1)
    assert "ok    contents: encrypted, and 1 content key can be used" in good.out
    assert "fail  contents: The content of the tenant default is encrypted under a master key" in wrong.out
    assert "set BATON_CONTENT_KEYS" in without.out
    assert "-> restore the master key" in wrong.out


def test_plain_contents_are_said_to_be_plain(tmp_path: Path) -> None:
    assert baton(tmp_path, "migrate").status == 0
    assert "ok    contents: stored as they are; BATON_CONTENT_KEYS would" in baton(tmp_path, "doctor").out
