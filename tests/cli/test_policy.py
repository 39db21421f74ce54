"""`baton policy`: who may see what, what a new pool file would widen, and what it would have refused."""

import json
from pathlib import Path

from tests.cli.test_commands import EASY, baton, serving
from tests.gateway.test_damaged_data import change

RULES = """
[rules.secrets-stay]
labels = ["secret"]
allow = { worker = ["sage"] }
[rules.idle]
labels = ["unheard-of"]
deny = { worker = ["sage"] }
[rules.secrets-need-a-person]
labels = ["secret"]
approve = { worker = ["sage"] }
"""
SMALL_POOL = """
[providers.rehearsal]
format = "rehearsal"
[workers.sage]
provider = "rehearsal"
model = "sage"
clearance = ["secret"]
[workers.scribe]
provider = "rehearsal"
model = "scribe"
clearance = ["secret"]
[tiers.baton-mini]
pool = ["sage", "scribe"]
"""


def test_the_policy_is_shown_compared_and_tried(tmp_path: Path) -> None:
    (tmp_path / "open.toml").write_text(SMALL_POOL)
    (tmp_path / "ruled.toml").write_text(SMALL_POOL + RULES)
    check = json.loads(baton(tmp_path, "policy", "check", "ruled.toml", "--json").out)
    (secret,) = [row for row in check["shown"] if row["labels"] == ["secret"]]
    assert secret["recipients"] == ["sage"]
    assert secret["excluded"] == {"scribe": "excluded by the rule secrets-stay"}
    assert check["without_effect"] == ["the rule idle excludes nobody who is cleared for unheard-of"]
    narrowed = baton(tmp_path, "policy", "diff", "open.toml", "ruled.toml")
    assert (narrowed.status, narrowed.out.strip()) == (0, "Nothing is shown to anybody who did not see it before.")
    widened = baton(tmp_path, "policy", "diff", "ruled.toml", "open.toml")
    words = (
        "widens: baton-mini with labels secret is shown to scribe at rehearsal, as worker; before: excluded by the rule"
    )
    assert widened.status == 1
    assert words in widened.out
    with serving(tmp_path, BATON_POOL="open.toml") as running:
        for labels in ([], ["secret"]):
            running.ask("baton-mini", EASY, baton={"labels": labels, "pool": {"pin": "scribe"}})
    assert baton(tmp_path, "policy", "try", "open.toml").status == 0
    tried = baton(tmp_path, "policy", "try", "ruled.toml", "--json")
    (refused,) = json.loads(tried.out)["refused"]
    assert (tried.status, json.loads(tried.out)["runs"], refused["labels"]) == (1, 2, ["secret"])
    assert refused["refused"] == {"scribe": "excluded by the rule secrets-stay"}
    change(tmp_path / "data", f"UPDATE events SET body = 'no json' WHERE run = '{refused['run']}' AND seq = 2")
    tried = baton(tmp_path, "policy", "try", "open.toml", "--json")
    assert (tried.status, json.loads(tried.out)) == (1, {"runs": 2, "refused": [], "damaged": [refused["run"]]})
    assert f"{refused['run']}  its journal cannot be read" in baton(tmp_path, "policy", "try", "open.toml").out


def test_a_missing_pool_file_is_named_without_a_setting_that_names_another(tmp_path: Path) -> None:
    result = baton(tmp_path, "policy", "check", "none.toml")
    assert (result.status, "none.toml" in result.err, "BATON_POOL" in result.err) == (2, True, False), result.err


def test_a_pool_file_is_read_with_the_addresses_and_the_conductor_of_the_environment(tmp_path: Path) -> None:
    text = SMALL_POOL.replace('format = "rehearsal"', 'format = "openai"\nkey = "HOUSE_KEY"')
    text += 'conductor = { kind = "model", worker = "conductor" }\n'
    (tmp_path / "pool.toml").write_text(text)
    more = {
        "REHEARSAL_BASE_URL": "http://house:8000/v1",
        "HOUSE_KEY_FILE": "/run/secrets/of-another-machine",
        "BATON_CONDUCTOR_URL": "http://vllm:8000/v1",
        "BATON_CONDUCTOR_MODEL": "qwen",
    }
    check = baton(tmp_path, "policy", "check", "pool.toml", "--json", **more)
    assert check.status == 0, check.err
    assert baton(tmp_path, "policy", "diff", "pool.toml", "pool.toml", **more).status == 0
    (unlabelled, *_) = json.loads(check.out)["shown"]
    assert unlabelled["recipients"] == ["sage", "scribe", "conductor (conductor)"]


def test_a_new_declassifier_is_a_widening(tmp_path: Path) -> None:
    old = SMALL_POOL.replace('model = "scribe"\nclearance = ["secret"]', 'model = "scribe"')
    (tmp_path / "old.toml").write_text(old)
    (tmp_path / "new.toml").write_text(old.replace('model = "sage"\n', 'model = "sage"\ndeclassifies = ["secret"]\n'))
    widened = baton(tmp_path, "policy", "diff", "old.toml", "new.toml")
    assert widened.status == 1
    assert "labels secret is shown to scribe at rehearsal, as worker, as what sage makes of it" in widened.out
    assert "before: not cleared for secret" in widened.out
    assert baton(tmp_path, "policy", "diff", "new.toml", "old.toml").status == 0
    assert "sage declassifies secret" in baton(tmp_path, "policy", "check", "new.toml").out
