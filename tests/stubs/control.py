"""The remote control of a stub in another process: the same verbs as `ProviderStub`, over its control endpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.harness.waiting import PATIENCE_SECONDS

from .script import Behaviour, to_json

ROOT = Path(__file__).resolve().parents[2]


class StubControl:
    """Calls the control endpoint of a stub, and waits for its answer. `url` is what the process printed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.openai_url, self.vllm_url = f"{url}/openai/v1", f"{url}/vllm/v1"
        self.anthropic_url, self.gemini_url = f"{url}/anthropic", f"{url}/gemini"

    def script(self, model: str, *behaviours: Behaviour) -> None:
        """Queue behaviours for a model, each for one request."""
        self._post("script", {"model": model, "behaviours": to_json(behaviours)})

    def always(self, model: str, behaviour: Behaviour) -> None:
        """Set what a model does whenever its queue is empty."""
        self._post("always", {"model": model, "behaviours": to_json([behaviour])})

    def clear(self) -> None:
        """Forget scripts and records."""
        self._post("clear", {})

    def release(self) -> None:
        """Continue all streams that stall without an end."""
        self._post("release", {})

    def requests(self, model: str | None = None) -> list[dict[str, Any]]:
        """Return all records as JSON (see `ReceivedRequest.as_json`)."""
        with urlopen(
            f"{self.url}/_stub/requests{f'?model={model}' if model else ''}", timeout=PATIENCE_SECONDS
        ) as answer:
            records: list[dict[str, Any]] = json.load(answer)
            return records

    def _post(self, verb: str, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        with urlopen(
            Request(f"{self.url}/_stub/{verb}", body, {"Content-Type": "application/json"}), timeout=PATIENCE_SECONDS
        ) as answer:
            answer.read()


@contextmanager
def stub_process(*options: str) -> Iterator[StubControl]:
    """Start `python -m tests.stubs`, and stop it at the end."""
    command = [sys.executable, "-m", "tests.stubs", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield StubControl(process.stdout.readline().strip())
        finally:
            process.kill()
