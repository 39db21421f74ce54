"""Two vLLM servers for the whole session: each takes longer to start than all of its tests to run. A third one, which
makes embeddings, for the test that stops it."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.vllm.server import TRAINED, VllmServer, serve


@pytest.fixture(scope="session")
def vllm_server(request: pytest.FixtureRequest) -> Iterator[VllmServer]:
    """`base_url` (with /v1) and `model`. `BATON_TEST_VLLM_URL` names a server that already runs, to save the start."""
    url = os.environ.get("BATON_TEST_VLLM_URL")
    if url:
        yield VllmServer(url)
        return
    with serve(_say(request.config)) as server:
        yield server


@pytest.fixture(scope="session")
def trained_server(request: pytest.FixtureRequest) -> Iterator[VllmServer]:
    """A server of the trained checkpoint, as `baton conductor serve --adapters` starts it. `BATON_TEST_TRAINED_URL`
    names one that already runs."""
    url = os.environ.get("BATON_TEST_TRAINED_URL")
    if url:
        yield VllmServer(url)
        return
    with serve(_say(request.config), TRAINED) as server:
        yield server


@pytest.fixture
def embedder(request: pytest.FixtureRequest) -> AbstractContextManager[VllmServer]:
    """A server of embeddings, to be started and stopped."""
    return serve(_say(request.config), embeds=True)


def _say(config: pytest.Config) -> Callable[[str], None]:
    capture = config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(line, flush=True)

    return say
