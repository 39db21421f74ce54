"""`baton tier`: what serves a tier is tried, promoted by its conditions or with a reason, listed and rolled back."""

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import baton

pytestmark = pytest.mark.usefixtures("database_of_commands")

REHEARSAL = Path(__file__).parents[2] / "app/process/config/rehearsal.toml"
NEXT = """
[tiers.baton-next]
pool = ["rehearsal-abacus"]
conductor = { kind = "fixed", shape = "single", workers = ["rehearsal-abacus"] }

[tiers.baton-mini.promotion]
min_pairs = 50
"""


@pytest.mark.long
def test_a_tier_is_tried_promoted_with_a_reason_and_rolled_back(tmp_path: Path) -> None:
    pool = tmp_path / "pool.toml"
    pool.write_text(REHEARSAL.read_text() + NEXT)
    environ = {"BATON_POOL": str(pool)}
    tried = baton(tmp_path, "tier", "canary", "baton-mini", "--to", "rehearsal-sage", "--share", "0.004", **environ)
    assert "baton-mini: its own definition; canary worker rehearsal-sage for 0.4% of the runs" in tried.out
    refused = baton(tmp_path, "tier", "promote", "baton-mini", "--to", "baton-next", **environ)
    assert (refused.status, "min_pairs" in refused.out, "Not promoted" in refused.err) == (1, True, True)
    assert "baton-mini, without a run to compare:" in refused.out
    forced = ("tier", "promote", "baton-mini", "--to", "baton-next", "--force", "incident 12", "--json")
    (change,) = json.loads(baton(tmp_path, *forced, **environ).out)["changes"]
    assert (change["version"], json.loads(change["note"])["forced"]) == ("tier baton-next", "incident 12")
    assert "Nothing was changed yet." in baton(tmp_path, "conductor", "ls", **environ).out
    listed = baton(tmp_path, "tier", "ls", **environ).out
    assert "baton-mini: tier baton-next\n" in listed
    assert "baton-ultra: its own definition\n" in listed
    assert "baton-next" not in baton(tmp_path, "conductor", "ls", **environ).out
    pool.write_text(REHEARSAL.read_text())
    assert "its own definition serves instead" in baton(tmp_path, "tier", "ls", **environ).out
    doctor = baton(tmp_path, "doctor", **environ)
    assert (doctor.status, "tier baton-next is to serve baton-mini" in doctor.out) == (1, True)
    gone = baton(tmp_path, "tier", "canary", "baton-ultra", "--to", "baton-next", "--share", "0.1", **environ)
    assert (gone.status, "the pool file has no tier baton-next" in gone.err) == (2, True)
    assert "baton-mini: its own definition\n" in baton(tmp_path, "tier", "rollback", "baton-mini", **environ).out
