"""Changes in words, as the console lists them."""

from typing import Any

from app.console.admin import change_words


def facts(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[str]:
    return change_words.change_facts({"before": before, "after": after}).split("\n")


def test_what_is_new_is_told_without_what_says_nothing() -> None:
    key = {"name": "ci", "tiers": [], "scopes": ["runs:read", "runs:write"], "max_usd": 2_500_000, "digest": "f00"}
    key |= {"all_tenants": False, "expires_at": 86_400.0, "rpm": None}
    assert facts(None, key) == [
        "Name: ci",
        "Scopes: runs:read, runs:write",
        "Dollars a run: $2.50",
        "Expires at: 1970-01-02 00:00:00 UTC",
    ]


def test_an_amount_of_nothing_is_told() -> None:
    assert facts(None, {"usd": 0, "max_usd": None, "share": 0.0, "all_tenants": False}) == ["Amount: $0"]


def test_what_is_another_now_is_told_with_what_it_was() -> None:
    before = {"usd": 5_000_000, "soft": None, "zone": "UTC", "digest": "f00"}
    after = before | {"usd": 10_000, "soft": 0.8, "digest": "f01"}
    assert facts(before, after) == ["Amount: was $5.00, is $0.01", "Warns at: was none, is 80 %", "Secret: another one"]
    assert facts(before, before) == ["\N{EN DASH}"]
    assert facts({"usd": 5_000_000}, None) == ["Amount: $5.00"], "of what was removed, what it was"


def test_an_action_of_a_later_release_is_shown_as_it_is() -> None:
    assert change_words.action_text({"action": "key.revoked"}) == "Key revoked"
    assert change_words.action_text({"action": "key.lent"}) == "key.lent"
