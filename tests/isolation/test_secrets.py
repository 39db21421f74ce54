"""No secret that Baton is given shows anywhere: each is a canary, and everything fails in whose message it could stand.

Provider keys, proxy credentials, the webhook's secret and URL, the pepper, content keys, an API key, and the passwords
in the URLs of database and Redis. Searched are logs at every level with their tracebacks, replies to callers, the whole
database file, metrics, spans, exports, and the output of commands.
"""

import asyncio
import base64
import logging
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.__main__ import main
from app.providers.adapters.openai import OpenAIProvider
from tests.harness.in_process import client_of, running_service
from tests.harness.processes import environment
from tests.harness.spans import Spans
from tests.stubs import Fail, Garbage, ProviderStub, Raw, Reply, StreamError, Truncate

TIERS = ("openai", "responses", "anthropic", "gemini", "far")
NOWHERE = "127.0.0.1:1"
KEYS = {f"{name.upper()}_KEY": f"Kanari-{name}-47" for name in ("openai", "responses", "anthropic", "gemini")}
SECRETS = KEYS | {
    "FAR_KEY": "Kanari-far-47",
    "FAR_PROXY": "Kanarienvogel-proxyuser:Kanarienvogel-proxy-4711",
    "BATON_PEPPER": "Kanarienvogel-pepper-4711-0123456789",
    "BATON_BOOTSTRAP_KEY": "bt_bootstrap_Kanarienvogel-bootstrap-4711-012345",
    "BATON_CONTENT_KEYS": base64.b64encode(b"Kanarienvogel-content-4711-01234").decode(),
    "BATON_WEBHOOK_SECRET": "whsec_" + base64.b64encode(b"Kanarienvogel-webhook-4711-01234").decode(),
}
URLS = {"BATON_WEBHOOK_URL": f"http://{NOWHERE}/hook?token=Kanarienvogel-hook-4711"}
DATABASES = {
    "BATON_DATABASE_URL": f"postgresql://baton:Kanarienvogel-database-4711@{NOWHERE}/baton",
    "BATON_REDIS_URL": f"redis://:Kanarienvogel-redis-4711@{NOWHERE}/0",
}
CANARIES = [
    *(value for name, value in SECRETS.items() if name != "FAR_PROXY"),
    *SECRETS["FAR_PROXY"].split(":"),
    base64.b64encode(SECRETS["FAR_PROXY"].encode()).decode(),
    *(
        "Kanarienvogel-hook-4711",
        "Kanarienvogel-database-4711",
        "Kanarienvogel-redis-4711",
        "Kanarienvogel-content-4711",
    ),
    "Kanarienvogel-webhook-4711",
]
PROVIDER = """
[providers.{name}]
format = "{format}"
base_url = "{url}"
key = "{name_upper}_KEY"
{more}
[workers.{name}-worker]
provider = "{name}"
model = "model-{name}"
price = {{ input = 1.0, output = 2.0 }}

[tiers.{name}]
pool = ["{name}-worker"]
conductor = {{ kind = "fixed", shape = "single", workers = ["{name}-worker"] }}
limits = {{ steps = 1, attempts = 1, seconds = 20, output_tokens = 500 }}
"""


def pool_text(stub: ProviderStub) -> str:
    """Return a pool file with a tier for each wire format, and one whose provider stands behind a proxy that is
    away."""
    text = ""
    for name in ("openai", "responses", "anthropic", "gemini"):
        url = getattr(stub, f"{name}_url")
        text += PROVIDER.format(name=name, format=name, url=url, name_upper=name.upper(), more="")
    more = f'proxy = "http://{NOWHERE}"\nproxy_credentials = "FAR_PROXY"\n'
    return text + PROVIDER.format(name="far", format="openai", url=stub.openai_url, name_upper="FAR", more=more)


def leaks(place: str, text: str) -> list[str]:
    """Return the canaries in a text, with its place."""
    return [f"{place}: {canary}" for canary in CANARIES if canary in text]


def quoting(key: str) -> Iterator[Any]:
    """Failures whose messages quote the key, as providers do."""
    message = f"Incorrect API key provided: {key}. You can find it at https://x.example/?key={key}"
    yield Fail(status=401, message=message, code=key)
    yield Fail(status=400, message=f"header authorization: Bearer {key} is malformed; {key[:-2]}")
    yield Fail(status=503, message=message, html=True)
    yield Reply(fault=StreamError(after=0, status=500, message=message))
    yield Reply(fault=Garbage(after=0, line=f"not json {message}"))
    yield Reply(fault=Truncate(after=0))
    yield Raw(status=502, body=f"<html>upstream said: Authorization: Bearer {key}</html>", content_type="text/html")
    yield Raw(status=200, body=f'{{"key": "{key}"}}', content_type="application/json")
    yield Raw(status=302, body=message, content_type="text/plain")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Records of every level, those of libraries included."""
    caplog.set_level(logging.DEBUG)
    caplog.handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
    for name in list(logging.Logger.manager.loggerDict):
        if not name.startswith(("sqlalchemy", "alembic")):  # statements with hashed keys
            caplog.set_level(logging.DEBUG, logger=name)
    return caplog


async def provoke(stub: ProviderStub, client: httpx.AsyncClient, tiers: Sequence[str]) -> list[str]:
    """Let everything fail that can quote a secret; returns the replies."""
    replies = []
    for tier in tiers:
        key = SECRETS[f"{tier.upper()}_KEY"]
        acts = list(quoting(key))  # their shares of the tiers overlap
        for act in acts if tier == "openai" else acts[TIERS.index(tier) :: 3]:
            stub.always("*", act)
            body = {"model": tier, "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
            reply = await client.post("/v1/chat/completions", json=body | {"stream": isinstance(act, Reply)})
            run = reply.headers.get("x-baton-run", "")
            replies += [reply.text, str(reply.headers), (await client.get(f"/v1/runs/{run}")).text]
            replies += [(await client.get(f"/v1/runs/{run}{path}")).text for path in ("/explain", "/graph", "/steps/0")]
            if tier == "far":  # which is never reached
                break
    stub.always("*", Reply())
    background = {"model": "openai", "input": "What is 2 + 2?", "background": True}
    replies.append((await client.post("/v1/responses", json=background)).text)
    return [*replies, (await client.get("/metrics")).text, (await client.get("/readyz")).text]


def baton(environ: dict[str, str], *arguments: str) -> str:
    """Return the output of one command, whatever it comes to."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(out):
        main(arguments, environ)
    return out.getvalue()


@pytest.mark.long
async def test_no_secret_shows_when_providers_quote_it_and_everything_fails(
    tmp_path: Path, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ProviderStub(any_key=True) as stub:
        spans = Spans()
        async with running_service(tmp_path, pool_text(stub), SECRETS | URLS, audits=False) as runtime:
            spans.record(runtime)
            async with client_of(runtime) as client:
                all_leaks = [leak for text in await provoke(stub, client, TIERS) for leak in leaks("a reply", text)]
                with monkeypatch.context() as broken:
                    broken.setattr(OpenAIProvider, "stream", _broken)
                    all_leaks += [
                        leak for text in await provoke(stub, client, ["far"]) for leak in leaks("a reply", text)
                    ]
        for key in KEYS.values():
            assert any(key in str(received.headers) for received in stub.requests), "the provider was sent its key"
    all_leaks += leaks("the log", logged.text)
    all_leaks += leaks("a span", " ".join(span.to_json() for span in spans.ended))
    assert "Traceback" in logged.text
    assert spans.ended
    environ = environment(
        tmp_path, **SECRETS, **URLS, BATON_DATA_DIR=str(tmp_path), BATON_POOL=str(tmp_path / "pool.toml")
    )
    for arguments in (("runs", "show"), ("runs", "explain"), ("runs", "ls", "--json"), ("config",), ("doctor",)):
        words = await asyncio.to_thread(baton, environ, *arguments)
        assert words, arguments
        all_leaks += leaks(f"baton {' '.join(arguments)}", words)
    await asyncio.to_thread(baton, environ, "audit", "export", str(tmp_path / "export.jsonl"))
    all_leaks += _in_files(tmp_path)
    assert sorted(set(all_leaks)) == []


def _in_files(folder: Path) -> list[str]:
    all_leaks = []
    for path in folder.iterdir():
        if path.is_file() and path.name != "pool.toml":
            all_leaks += leaks(path.name, path.read_bytes().decode(errors="replace"))
    return all_leaks


async def _broken(*_arguments: Any) -> Any:
    raise KeyError("choices")
    yield


def test_no_password_of_a_database_that_is_away_shows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], logged: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "pool.toml").write_text("")
    environ = environment(tmp_path, **SECRETS, **DATABASES)
    all_leaks = []
    for arguments in (("doctor",), ("config",), ("migrate",), ("runs", "ls"), ("keys", "ls"), ("audit", "check")):
        all_leaks += leaks(f"baton {' '.join(arguments)}", baton(environ, *arguments))
    assert all_leaks + leaks("the log", logged.text) + leaks("the terminal", "".join(capfd.readouterr())) == []


MISTAKES = {
    "a key in the pool file": ('key = "OPENAI_KEY"', 'key = "Kanari-openai-47"'),
    "credentials in an address": ('base_url = "http://', 'base_url = "http://u:Kanari-far-47@'),
    "credentials in a proxy": (f'proxy = "http://{NOWHERE}', f'proxy = "http://u:Kanarienvogel-proxy-4711@{NOWHERE}'),
    "no TOML": ('key = "FAR_KEY"', "key = Kanari-far-47"),
    "an unknown field": ('key = "FAR_KEY"', 'secret = "Kanari-far-47"'),
    "a number": ('key = "FAR_KEY"', 'key = ["Kanari-far-47"]'),
}
BAD_SETTINGS = {
    "BATON_DATABASE_URL": "postgresql://baton:Kanarienvogel-database-4711@[::1/baton?x=%zz",
    "BATON_REDIS_URL": "http://:Kanarienvogel-redis-4711@x:port/0",
    "BATON_BOOTSTRAP_KEY": "Kanari-far-47",
    "BATON_CONTENT_KEYS": "Kanarienvogel-content-4711",
    "BATON_WEBHOOK_SECRET": "Kanarienvogel-webhook-4711",
    "BATON_WEBHOOK_URL": "ftp://u:Kanarienvogel-hook-4711@x",
    "BATON_CONDUCTOR_URL": "http://u:Kanari-far-47@x/v1",
    "OPENAI_BASE_URL": "http://u:Kanari-far-47@x/v1",
    "BATON_ARCHIVE_ENDPOINT": "http://u:Kanari-far-47@x",
    "BATON_OIDC_ISSUER": "http://u:Kanari-far-47@x",
}


@pytest.mark.long
async def test_no_fault_of_the_settings_or_the_pool_file_repeats_a_secret(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        text = pool_text(stub)
    pool = tmp_path / "pool.toml"
    usual = environment(tmp_path, **SECRETS, BATON_POOL=str(pool))
    all_leaks, outputs = [], []
    for mistake, (old, new) in MISTAKES.items():
        assert old in text
        pool.write_text(text.replace(old, new))
        outputs.append(baton(usual, "config"))
        all_leaks += leaks(mistake, outputs[-1])
    pool.write_text(text)
    for name, value in BAD_SETTINGS.items():
        for command in ("config", "doctor"):
            all_leaks += leaks(f"{name}, {command}", baton(usual | {name: value}, command))
    assert all("pool.toml" in words or "providers" in words for words in outputs)
    assert all_leaks == []
