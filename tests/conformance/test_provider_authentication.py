"""Azure OpenAI, Bedrock and Vertex: what authenticates a request, verified by a stub, and their paths and framing."""

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from botocore.eventstream import EventStreamBuffer
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

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
from tests.conformance.wire_formats import PATIENT, ending, request, text_of_pieces
from tests.stubs import Reply
from tests.stubs.clouds import (
    CloudStub,
    TokenStub,
    chunk,
    exception,
    framed,
    message,
    require_signature,
    with_header,
)

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
        assert text_of_pieces(await answer(spec, "azure-secret", live=live)) == "Hello there."
        failed = await error(spec, "azure-wrong")
    assert type(failed) is WorkerMisconfigured
    assert "azure-wrong" not in f"{failed} {failed.failure}"


@pytest.mark.long
async def test_a_token_of_entra_is_fetched_once_for_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TokenStub() as tokens, CloudStub(with_header("authorization", "Bearer entra-1")) as cloud:
        for name in list(os.environ):
            if name.startswith(("AZURE_", "IDENTITY_", "MSI_")):
                monkeypatch.delenv(name)
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{tokens.url}/msi/token")
        monkeypatch.setenv("IDENTITY_HEADER", "of-the-app-service")
        spec = ProviderSpec("cloud", "openai", f"{cloud.url}/openai/v1", auth="azure")
        opened, question = adapter(spec), request()
        for _ in range(2):
            async for _ in opened.stream(question, opened.render(question), PATIENT):
                pass
        await opened.close()
    (token_request,) = tokens.requests
    assert token_request.query["resource"] == "https://cognitiveservices.azure.com"
    assert token_request.header("x-identity-header") == "of-the-app-service"


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
    token.forget()
    assert await token.headers("", b"") == {"authorization": "Bearer token-3"}


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
    async with CloudStub(require_signature(ACCESS, SECRET, REGION, session)) as cloud:
        spec = ProviderSpec("cloud", "anthropic", cloud.url, auth="aws", region=REGION)
        pieces = await answer(spec, worker=Worker("w", "cloud", model), live=live)
        assert text_of_pieces(pieces) == "Hello there."
        assert ending(pieces).usage == Usage(12, 0, 7, 0)
        (received,) = cloud.requests
    verb = "invoke-with-response-stream" if live else "invoke"
    assert received.path == f"/model/{model}/{verb}"
    assert received.header("x-api-key") is None
    assert received.header("anthropic-version") is None


async def test_a_signature_of_another_region_or_secret_is_refused(aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with CloudStub(require_signature(ACCESS, SECRET, REGION)) as cloud:
        spec = ProviderSpec("cloud", "anthropic", cloud.url, auth="aws", region="us-east-1")
        assert type(await error(spec, worker=CLAUDE)) is WorkerMisconfigured
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        spec = ProviderSpec("cloud", "anthropic", cloud.url, auth="aws", region=REGION)
        assert type(await error(spec, worker=CLAUDE)) is WorkerMisconfigured


async def test_credentials_that_were_replaced_are_found_once_the_old_ones_are_refused(
    aws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with CloudStub(require_signature(ACCESS, SECRET, REGION)) as cloud:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "revoked")
        opened = adapter(ProviderSpec("cloud", "openai", f"{cloud.url}/openai/v1", auth="aws", region=REGION))
        question = request()
        outcomes: list[object] = []
        for _attempt in range(3):
            try:
                async for _ in opened.stream(question, opened.render(question), PATIENT):
                    pass
                outcomes.append("answered")
            except WorkerError as refused:
                outcomes.append(type(refused))
            if len(outcomes) == 1:
                monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        await opened.close()
    assert outcomes == [WorkerMisconfigured, "answered", "answered"]


async def test_openais_format_at_bedrock_is_signed_too(aws: None) -> None:
    async with CloudStub(require_signature(ACCESS, SECRET, REGION)) as cloud:
        spec = ProviderSpec("cloud", "openai", f"{cloud.url}/openai/v1", auth="aws", region=REGION)
        assert text_of_pieces(await answer(spec)) == "Hello there."


async def test_without_credentials_nothing_is_sent(aws: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    async with CloudStub(require_signature(ACCESS, SECRET, REGION)) as cloud:
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
        (framed(b"\x01a\x63", b""), WorkerMalformed),
        (framed(b"\x01a", b""), WorkerMalformed),
        (framed(b"\x01\xff\x00", b""), WorkerMalformed),
        (b"", WorkerTruncated),
        (chunk('{"type": "message_stop"}')[:-4], WorkerTruncated),
    ],
)
async def test_an_event_stream_that_ends_badly(aws: None, tail: bytes, expected: type[WorkerError]) -> None:
    async with CloudStub(require_signature(ACCESS, SECRET, REGION)) as cloud:
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


@pytest.fixture(scope="module")
def service_account() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@BOTH
@pytest.mark.parametrize(("form", "publisher"), [("gemini", "google"), ("anthropic", "anthropic")])
async def test_requests_to_vertex_have_a_token_and_its_paths(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    service_account: rsa.RSAPrivateKey,
    form: Any,
    publisher: str,
    live: bool,
) -> None:
    place = f"/v1/projects/p/locations/europe-west1/publishers/{publisher}"
    async with TokenStub() as tokens, CloudStub(with_header("authorization", "Bearer google-1")) as cloud:
        file = tmp_path / "account.json"
        file.write_text(json.dumps(account_file(service_account, f"{tokens.url}/token")))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        cloud.replies = [Reply(chunks=("Guten", " Tag."))]
        spec = ProviderSpec("cloud", form, cloud.url + place, auth="google")
        assert text_of_pieces(await answer(spec, live=live, worker=Worker("w", "cloud", "model-a@001"))) == "Guten Tag."
        assert cloud.requests[0].path.startswith(f"{place}/models/model-a@001:")
    claims = claims_of(tokens.fields[0]["assertion"], service_account)
    assert claims["iss"] == "baton@p.iam.gserviceaccount.com"
    assert claims["scope"] == "https://www.googleapis.com/auth/cloud-platform"


def account_file(key: rsa.RSAPrivateKey, token_uri: str) -> dict[str, str]:
    """The file of a service account, as Google gives it out."""
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "1",
        "private_key": private.decode(),
        "client_email": "baton@p.iam.gserviceaccount.com",
        "token_uri": token_uri,
    }


def claims_of(assertion: str, key: rsa.RSAPrivateKey) -> dict[str, Any]:
    """The claims of a JWT. Raises `InvalidSignature` if this key did not sign it."""
    signed_part, _, signature = assertion.rpartition(".")
    key.public_key().verify(decode_unpadded(signature), signed_part.encode(), padding.PKCS1v15(), hashes.SHA256())
    claims: dict[str, Any] = json.loads(decode_unpadded(signed_part.partition(".")[2]))
    return claims


def decode_unpadded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


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


def load_provider(folder: Path, form: str, lines: str) -> ProviderSpec:
    (folder / "pool.toml").write_text(POOL.format(form=form, lines=lines))
    environ = {"BATON_POOL": str(folder / "pool.toml"), "CLOUD_KEY": "k"}
    return configure(environ).catalog.providers["cloud"]


def test_a_pool_file_with_clouds(tmp_path: Path) -> None:
    azure = load_provider(tmp_path, "openai", 'auth = "api-key"\nkey = "CLOUD_KEY"\napi_version = "2026-01-01"')
    assert (azure.auth, azure.api_version) == ("api-key", "2026-01-01")
    bedrock = load_provider(tmp_path, "anthropic", 'auth = "aws"\nregion = "eu-west-1"')
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
        load_provider(tmp_path, form, lines)
    assert any(f"providers.cloud.{fault}" in line for line in caught.value.faults), caught.value.faults


@pytest.mark.parametrize(("auth", "extra"), [("azure", "azure"), ("aws", "bedrock"), ("google", "vertex")])
def test_a_library_that_is_not_installed_is_a_fault_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auth: str, extra: str
) -> None:
    monkeypatch.setattr(authentication, "find_spec", lambda name: None)
    region = 'region = "eu-west-1"' if auth == "aws" else ""
    with pytest.raises(ConfigInvalid) as caught:
        load_provider(tmp_path, "anthropic", f'auth = "{auth}"\n{region}')
    assert f"pip install 'baton[{extra}]'" in caught.value.faults[0]
    with pytest.raises(ConfigInvalid) as caught:
        adapter(ProviderSpec("cloud", "anthropic", "https://example.org", auth=auth, region="x"))  # type: ignore[arg-type]
    assert f"pip install 'baton[{extra}]'" in caught.value.faults[0]
