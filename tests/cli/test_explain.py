"""`baton runs explain` over the data folder of a running service."""

import asyncio
import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from app.__main__ import main
from tests.harness.in_process import ask, client_of, plan, pool_text, running_service
from tests.harness.processes import environment
from tests.stubs import ProviderStub


def baton(folder: Path, *arguments: str) -> str:
    """The output of one command."""
    with redirect_stdout(StringIO()) as out:
        assert main(arguments, environment(folder, BATON_DATA_DIR=str(folder))) == 0
    return out.getvalue()


@pytest.mark.long
async def test_a_run_is_explained_on_the_terminal(tmp_path: Path, stub: ProviderStub) -> None:
    steps = plan(("alpha", "Think", ["user"]), ("beta", "Answer", [0]))
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        async with client_of(runtime) as client:
            assert (await ask(client, baton={"plan": steps})).status_code == 200
        words = await asyncio.to_thread(baton, tmp_path, "runs", "explain")
        data = json.loads(await asyncio.to_thread(baton, tmp_path, "runs", "explain", "--json"))
        readings = json.loads(await asyncio.to_thread(baton, tmp_path, "audit", "reads", "--json"))
    assert [reading["what"] for reading in readings] == ["reasons", "reasons"]
    assert data["text"] == words.rstrip("\n")
    assert "the request brought its own plan, and no conductor was asked" in words
    assert "Withheld: the caller's words, by the caller's plan." in words
