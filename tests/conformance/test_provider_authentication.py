"""Azure OpenAI, Bedrock and Vertex: what authenticates a request, verified by a stub, and their paths and framing."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.eventstream import EventStreamBuffer

from app.core.message.chat import Piece, Usage
from app.core.pool.catalog import ProviderSpec, Worker
from app.errors import (
    ConfigInvalid,
    WorkerError,
    WorkerMalformed,
    WorkerMisconfigured,
    WorkerRateLimited,
    WorkerTruncated,
    WorkerUnavailable,
)
from app.process.config import configure
from app.providers import authentication
from app.providers.formats import adapter
from tests.conformance.wire_formats import PATIENT, ending, request, said
from tests.stubs import Reply
from tests.stubs.clouds import CloudStub, chunk, exception, message, signed, with_header

ACCESS, SECRET, REGION = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "eu-west-1"
CLAUDE = Worker("w", "cloud", "anthropic.claude-opus-5-v1:0")
PROFILE = "arn:aws:bedrock:eu-west-1:123456789012:inference-profile/eu.anthropic.claude-opus-5-v1:0"
BOTH = pytest.mark.parametrize("live", [True, False])


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials where botocore looks for them first, and no other place for it to look at."""
    for name, value in (("ACCESS_KEY_ID", ACCESS), ("SECRET_ACCESS_KEY", SECRET), ("EC2_METADATA_DISABLED", "true")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)


async def answer(spec: ProviderSpec, key: str | None = None, **changes: Any) -> list[Piece]:
    """The pieces of one call."""
    opened, question = adapter(spec, key), request(**changes)
    try:
        stream = opened.stream(question, opened.render(question), PATIENT)
        return [piece async for batch in stream for piece in batch]
    finally:
        await opened.close()


async def error(spec: ProviderSpec, key: str | None = None, **changes: Any) -> WorkerError:
    """The error of one call."""
    with pytest.raises(WorkerError) as caught:
        await answer(spec, key, **changes)
    return caught.value


# --- Azure OpenAI


@BOTH
@pytest.mark.parametrize("form", ["openai", "responses"])
async def test_azures_key_goes_into_its_own_header_and_the_version_into_the_query(form: Any, live: bool) -> None:
    async with CloudStub(with_header("api-key", "azure-secret", "api-version=2026-01-01")) as cloud:
        base = f"{cloud.url}/openai/v1"
        spec = ProviderSpec("cloud", form, base, auth="api-key", api_version="2026-01-01")
        assert said(await answer(spec, "azure-secret", live=live)) == "Hello there."
        failed = await error(spec, "azure-wrong")
    assert type(failed) is WorkerMisconfigured
    assert "azure-wrong" not in f"{failed} {failed.failure}"


async def test_a_token_of_entra_is_fetched_once_for_several_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[str] = []

    class Credential:
        def get_token(self, scope: str) -> Any:
            fetched.append(scope)
            return SimpleNamespace(token=f"entra-{len(fetched)}", expires_on=0)

    monkeypatch.setattr(authentication, "missing_extra", lambda auth: "")
    monkeypatch.setattr(
        authentication, "import_module", lambda name: SimpleNamespace(DefaultAzureCredential=Credential)
    )
    async with CloudStub(with_header("authorization", "Bearer entra-1")) as cloud:
        spec = ProviderSpec("cloud", "openai", f"{cloud.url}/openai/v1", auth="azure")
        opened, question = adapter(spec), request()
        for _ in range(2):
            async for _ in opened.stream(question, opened.render(question), PATIENT):
                pass
        await opened.close()
    assert fetched == ["https://cognitiveservices.azure.com/.default"]


async def test_a_token_is_asked_for_again_after_a_minute_and_by_one_call_at_a_time() -> None:
    now, fetched = [0.0], list[int]()

    def fetch() -> str:
        fetched.append(1)
        return f"token-{len(fetched)}"

    token = authentication.Token(lambda: fetch, lambda: now[0])
    first = await asyncio.gather(*(token.headers("", b"") for _ in range(4)))
    assert first == [{"authorization": "Bearer token-1"}] * 4
    now[0] = authentication.FRESH - 1
    assert await token.headers("", b"") == first[0]
    now[0] = authentication.FRESH
    assert await token.headers("", b"") == {"authorization": "Bearer token-2"}


# --- Bedrock


@pytest.mark.parametrize(
    ("model", "live", "session"),
    [(CLAUDE.model, True, ""), (CLAUDE.model, False, "session-token"), (PROFILE, True, "session-token")],
)
async def test_requests_to_bedrock_are_signed(
    aws: None, monkeypatch: pytest.MonkeyPatch, model: str, live: bool, session: str
) -> None:
    """The model's name has a colon, which is quoted in what is signed and not on the wire."""
    if session:
        monkeypatch.setenv("AWS_SESSION_TOKEN", session)
    async with CloudStub(signed(ACCESS, SECRET, REGION, session)) as cloud:
        spec = ProviderSpec("cloud", "anthropic", cloud.url, auth="aws", region=REGION)
        pieces = await answer(spec, worker=Worker("w", "cloud", model), live=live)
        assert said(pieces) == "Hello there."
        assert ending(pieces).usage == Usage(12, 0, 7, 0)
        (received,) = cloud.requests
    verb = "invoke-with-response-stream" if live else "invoke"
    assert received.path == f"/model/{model}/{verb}"
    assert received.header("x-api-key") is None
    assert received.header("anthropic-version") is None


async def test_a_signature_of_another_region_or_secret_is_refused(aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with CloudStub(signed(ACCESS, SECRET, REGION)) as cloud:
        spec = ProviderSpec("cloud", "anthropic", cloud.url, auth="aws", region="us-east-1")
        assert type(await error(spec, worker=CLAUDE)) is WorkerMisconfigured
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        spec = ProviderSpec("cloud", "anthropic", cloud.url, auth="aws", region=REGION)
        assert type(await error(spec, worker=CLAUDE)) is WorkerMisconfigured


async def test_openais_format_at_bedrock_is_signed_too(aws: None) -> None:
    async with CloudStub(signed(ACCESS, SECRET, REGION)) as cloud:
        spec = ProviderSpec("cloud", "openai", f"{cloud.url}/openai/v1", auth="aws", region=REGION)
        assert said(await answer(spec)) == "Hello there."


async def test_without_credentials_nothing_is_sent(aws: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    async with CloudStub(signed(ACCESS, SECRET, REGION)) as cloud:
        failed = await error(ProviderSpec("cloud", "anthropic", cloud.url, auth="aws", region=REGION), worker=CLAUDE)
        assert cloud.requests == []
    assert type(failed) is WorkerMisconfigured
    assert failed.failure.reason == "authentication"
    assert "no credentials" in str(failed)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (exception("throttlingException"), WorkerRateLimited),
        (exception("internalServerException"), WorkerUnavailable),
        (chunk("no json"), WorkerMalformed),
        (message({":message-type": "event", ":event-type": "chunk"}, b'{"bytes": "%"}'), WorkerMalformed),
        (chunk('{"type": "message_stop"}')[:-1] + b"\x00", WorkerMalformed),
        (b"", WorkerTruncated),
        (chunk('{"type": "message_stop"}')[:-4], WorkerTruncated),
    ],
)
async def test_an_event_stream_that_ends_badly(aws: None, tail: bytes, expected: type[WorkerError]) -> None:
    async with CloudStub(signed(ACCESS, SECRET, REGION)) as cloud:
        cloud.tail = tail
        failed = await error(ProviderSpec("cloud", "anthropic", cloud.url, auth="aws", region=REGION), worker=CLAUDE)
    assert type(failed) is expected
    assert "canary" not in str(failed)


def test_the_stubs_event_stream_is_the_published_one() -> None:
    buffer = EventStreamBuffer()
    buffer.add_data(message({":event-type": "chunk"}, b"{}") + exception("x"))
    first, second = list(buffer)
    assert (first.headers, first.payload) == ({":event-type": "chunk"}, b"{}")
    assert second.headers[":exception-type"] == "x"


# --- Vertex


@BOTH
@pytest.mark.parametrize(("form", "publisher"), [("gemini", "google"), ("anthropic", "anthropic")])
async def test_requests_to_vertex_have_a_token_and_its_paths(
    monkeypatch: pytest.MonkeyPatch, form: Any, publisher: str, live: bool
) -> None:
    class Credentials:
        valid, token = False, ""

        def refresh(self, transport: object) -> None:
            self.valid, self.token = True, "google-token"

    modules = {
        "google.auth": SimpleNamespace(default=lambda scopes: (Credentials(), "project")),
        "google.auth.transport.requests": SimpleNamespace(Request=object),
    }
    monkeypatch.setattr(authentication, "missing_extra", lambda auth: "")
    monkeypatch.setattr(authentication, "import_module", modules.__getitem__)
    place = f"/v1/projects/p/locations/europe-west1/publishers/{publisher}"
    async with CloudStub(with_header("authorization", "Bearer google-token")) as cloud:
        cloud.replies = [Reply(chunks=("Guten", " Tag."))]
        spec = ProviderSpec("cloud", form, cloud.url + place, auth="google")
        assert said(await answer(spec, live=live, worker=Worker("w", "cloud", "model-a@001"))) == "Guten Tag."
        assert cloud.requests[0].path.startswith(f"{place}/models/model-a@001:")


# --- the pool file

POOL = """
[providers.cloud]
format = "{form}"
base_url = "https://example.org/openai/v1"
{lines}

[workers.w]
provider = "cloud"
model = "m"
price = {{ input = 1, output = 2 }}

[tiers.baton-mini]
pool = ["w"]
"""


def loaded(folder: Path, form: str, lines: str) -> ProviderSpec:
    (folder / "pool.toml").write_text(POOL.format(form=form, lines=lines))
    environ = {"BATON_POOL": str(folder / "pool.toml"), "CLOUD_KEY": "k"}
    return configure(environ).catalog.providers["cloud"]


def test_a_pool_file_with_clouds(tmp_path: Path) -> None:
    azure = loaded(tmp_path, "openai", 'auth = "api-key"\nkey = "CLOUD_KEY"\napi_version = "2026-01-01"')
    assert (azure.auth, azure.api_version) == ("api-key", "2026-01-01")
    bedrock = loaded(tmp_path, "anthropic", 'auth = "aws"\nregion = "eu-west-1"')
    assert (bedrock.auth, bedrock.region) == ("aws", "eu-west-1")


@pytest.mark.parametrize(
    ("form", "lines", "fault"),
    [
        ("openai", 'auth = "api-key"', "key: is missing"),
        ("anthropic", 'auth = "aws"', "region: is missing"),
        ("anthropic", 'auth = "aws"\nregion = "eu-west-1"\nkey = "CLOUD_KEY"', "key: is of no use"),
        ("gemini", 'auth = "aws"\nregion = "eu-west-1"', "auth: does not go with the format gemini"),
        ("openai", 'region = "eu-west-1"', "region: has no effect"),
        ("gemini", 'api_version = "v1"', "api_version: has no effect"),
        ("openai", 'auth = "magic"', "auth: must be 'key'"),
    ],
)
def test_settings_of_clouds_that_cannot_be_are_refused(tmp_path: Path, form: str, lines: str, fault: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        loaded(tmp_path, form, lines)
    assert any(f"providers.cloud.{fault}" in line for line in caught.value.faults), caught.value.faults


@pytest.mark.parametrize(("auth", "extra"), [("azure", "azure"), ("aws", "bedrock"), ("google", "vertex")])
def test_a_library_that_is_not_installed_is_a_fault_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auth: str, extra: str
) -> None:
    monkeypatch.setattr(authentication, "find_spec", lambda name: None)
    region = 'region = "eu-west-1"' if auth == "aws" else ""
    with pytest.raises(ConfigInvalid) as caught:
        loaded(tmp_path, "anthropic", f'auth = "{auth}"\n{region}')
    assert f"pip install 'baton[{extra}]'" in caught.value.faults[0]
    with pytest.raises(ConfigInvalid) as caught:
        adapter(ProviderSpec("cloud", "anthropic", "https://example.org", auth=auth, region="x"))  # type: ignore[arg-type]
    assert f"pip install 'baton[{extra}]'" in caught.value.faults[0]
