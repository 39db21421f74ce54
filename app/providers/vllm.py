"""The management API of a vLLM server: which models it serves, and loading and unloading adapters while it runs.

For an operator's command line only. No route of the gateway leads here: an adapter can change the plans of all callers.
vLLM has these paths only if it was started with VLLM_ALLOW_RUNTIME_LORA_UPDATING, which it should be behind a network
that callers cannot reach. Errors show the server's own message, because only operators see them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from app.core.pool.catalog import DIRECT, Route
from app.errors import ConfigInvalid, WorkerMalformed, WorkerTimeout, WorkerUnavailable
from app.network import retries
from app.network.http_client import client

SECONDS = 120.0
"""Loading an adapter reads it from disk and copies it to the device."""
SHOWN = 300
"""Most characters of a server's own message that are shown."""
Messages = Sequence[Mapping[str, str]]


class Management:
    """One server; `close` it."""

    def __init__(
        self,
        base_url: str,
        key: str | None,
        seconds: float = SECONDS,
        *,
        route: Route = DIRECT,
        proxy_credentials: str | None = None,
    ) -> None:
        """`base_url` is that of its OpenAI-compatible API, with `/v1`; `route` is its provider's."""
        self._base = base_url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = client(headers=headers, timeout=seconds, route=route, proxy_credentials=proxy_credentials)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def models(self) -> list[str]:
        """Return every model name that it serves: its base model's names, and adapters."""
        reply = self._request("GET", f"{self._base}/models")
        try:
            return [model["id"] for model in reply["data"]]
        except (KeyError, TypeError):
            raise WorkerMalformed(f"{self._base}/models did not list models.") from None

    def load(self, name: str, path: str) -> None:
        """Load an adapter from a folder of the server's own disk, under this name."""
        self._call_adapter_route("load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload(self, name: str) -> None:
        """Unload an adapter from the server."""
        self._call_adapter_route("unload_lora_adapter", {"lora_name": name})

    def tokens(self, model: str, messages: Messages) -> list[int]:
        """Return the tokens of a conversation by the server's tokenizer and chat template."""
        reply = self._request(
            "POST", f"{self._base.removesuffix('/v1')}/tokenize", {"model": model, "messages": list(messages)}
        )
        try:
            return [int(token) for token in reply["tokens"]]
        except (KeyError, TypeError, ValueError):
            raise WorkerMalformed(f"{self._base} did not return the tokens of a prompt.") from None

    def plan(self, model: str, messages: Messages, schema: Mapping[str, Any], max_tokens: int) -> str:
        """Return the model's likeliest answer under a schema."""
        form = {"type": "json_schema", "json_schema": {"name": "plan", "strict": True, "schema": schema}}
        body = {"model": model, "messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
        reply = self._request("POST", f"{self._base}/chat/completions", body | {"response_format": form})
        try:
            return str(reply["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            raise WorkerMalformed(f"{self._base} did not answer with a chat completion.") from None

    def _call_adapter_route(self, verb: str, body: Mapping[str, str]) -> None:
        reply = self._send("POST", f"{self._base}/{verb}", body)
        if reply.status_code == httpx.codes.NOT_FOUND and not _words(reply):
            raise ConfigInvalid(
                [
                    f"{self._base}/{verb}: is not there; start vLLM with --enable-lora and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, as `baton conductor serve --adapters` does"
                ]
            )
        self._check(reply)

    def _request(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> Any:
        reply = self._send(method, url, body)
        self._check(reply)
        try:
            return reply.json()
        except ValueError:
            raise WorkerMalformed(f"{url} did not answer in JSON.") from None

    def _send(self, method: str, url: str, body: Mapping[str, Any] | None) -> httpx.Response:
        connecting = retries.management(faults=(httpx.ConnectError, httpx.ConnectTimeout))
        try:
            reply: httpx.Response = connecting(self._client.request, method, url, json=body)
            return reply
        except httpx.TimeoutException:
            raise WorkerTimeout(f"{url} did not answer within {self._client.timeout.read:g} seconds.") from None
        except httpx.HTTPError as error:
            raise WorkerUnavailable(f"{url} could not be reached ({type(error).__name__}).") from None

    def _check(self, reply: httpx.Response) -> None:
        if not reply.is_success:
            message = _words(reply) or reply.text
            raise ConfigInvalid([f"{reply.url}: status {reply.status_code}: {message[:SHOWN] or 'without a message'}"])


def _words(reply: httpx.Response) -> str:
    """Return the message of an error in OpenAI's form; empty if it has none."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
