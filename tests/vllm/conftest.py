"""One vLLM server for the whole session: it takes longer to start than all of these tests to run."""

import os
from collections.abc import Iterator

import pytest

from tests.vllm.server import VllmServer, serve


@pytest.fixture(scope="session")
def vllm_server(request: pytest.FixtureRequest) -> Iterator[VllmServer]:
    """`base_url` (with /v1) and `model`. `BATON_TEST_VLLM_URL` names a server that already runs, to save the start."""
    given = os.environ.get("BATON_TEST_VLLM_URL")
    if given:
        yield VllmServer(given)
        return
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(line, flush=True)

    with serve(say) as server:
        yield server
