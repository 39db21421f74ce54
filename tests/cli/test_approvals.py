"""`baton approvals` on the database of a service that has stopped."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.cli.test_commands import baton
from tests.gateway.test_approvals import pool
from tests.harness.in_process import finish, order, running_service
from tests.stubs import ProviderStub


async def waiting(folder: Path) -> str:
    """A run whose plan waits for an approval."""
    place = {"BATON_DATA_DIR": str(folder / "data")}
    async with ProviderStub() as stub, running_service(folder, pool(stub), place) as runtime:
        return (await finish(await runtime.runs.start(order(runtime, "baton-mini")))).ended.state.run


@pytest.mark.long
def test_a_plan_is_shown_and_decided_on_at_the_command_line(tmp_path: Path) -> None:
    run, pool_file = asyncio.run(waiting(tmp_path)), str(tmp_path / "pool.toml")
    first = baton(tmp_path, "approvals", "ls", "--json")
    assert first.status == 0, first.err
    (listed,) = json.loads(first.out)
    assert (listed["run"], listed["status"]) == (run, "waiting")
    assert run in baton(tmp_path, "approvals", "ls").out
    text = baton(tmp_path, "approvals", "show", run).out
    assert listed["digest"] in text
    assert "step 0: alpha sees user" in text
    assert "estimate" not in text, "its worker is not in the rehearsal pool, which counts where no pool file is named"
    likely = r"estimate: \$\S+ \(\$\S+ to \$\S+\) and .* to execute, from prices and usual sizes; at most \$"
    assert re.search(likely, baton(tmp_path, "approvals", "show", run, "--pool", pool_file).out)
    priced = baton(tmp_path, "approvals", "show", run, "--pool", pool_file, "--json").out
    assert json.loads(priced)["estimate"]["steps"][0]["worker"] == "alpha"
    reads = json.loads(baton(tmp_path, "audit", "reads", "--json").out)
    assert [(entry["run"], entry["via"], entry["what"]) for entry in reads] == [(run, "command", "approval")], (
        "shown thrice"
    )
    wrong = baton(tmp_path, "approvals", "approve", run, "--digest", "0" * 64, "--pool", pool_file)
    assert wrong.status == 1
    refusal = baton(tmp_path, "approvals", "refuse", run, "--reason", "No.", "--pool", pool_file, "--json")
    assert json.loads(refusal.out)["decision"]["reason"] == "No."
    assert "refused" in baton(tmp_path, "approvals", "ls", "--decided").out
    assert "until" not in baton(tmp_path, "approvals", "show", run).out, "nothing is waited for any more"
    assert json.loads(baton(tmp_path, "approvals", "ls", "--json").out) == []
    watched = " ".join(baton(tmp_path, "runs", "watch", run).out.split())
    question = r"run.awaiting_approval proposal 0, because of tier: alpha, for at most \$0\.\d+, until [-:\d ]+ UTC"
    assert re.search(question, watched)
    assert "run.refused proposal 0, by command:" in watched


@pytest.mark.long
def test_plans_that_were_decided_are_listed_behind_newer_ones_that_wait(tmp_path: Path) -> None:
    """Those that wait take no place of the list."""
    first = asyncio.run(waiting(tmp_path))
    asyncio.run(waiting(tmp_path))
    assert baton(tmp_path, "approvals", "refuse", first, "--pool", str(tmp_path / "pool.toml")).status == 0
    decided = json.loads(baton(tmp_path, "approvals", "ls", "--decided", "--limit", "1", "--json").out)
    assert [approval["run"] for approval in decided] == [first]
