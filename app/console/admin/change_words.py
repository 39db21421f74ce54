"""Changes in words: what was done, and which facts are others since then, as the list of changes tells them."""

from collections.abc import Mapping
from typing import Any, Final

from app.console.templating import NOTHING, moment, usd
from app.core.pool.catalog import MILLION

Fields = Mapping[str, Any]

ACTION_TEXTS: Final[Mapping[str, str]] = {
    "key.added": "Key made",
    "key.revoked": "Key revoked",
    "key.rotated": "Key given a new secret",
    "key.rehashed": "Key's secret hashed under the present pepper",
    "tenant.created": "Tenant created",
    "tenant.disabled": "Tenant disabled",
    "tenant.enabled": "Tenant enabled",
    "budget.set": "Budget set",
    "budget.removed": "Budget removed",
    "hold.placed": "Legal hold placed",
    "hold.released": "Legal hold released",
    "conductor.loaded": "Version loaded",
    "conductor.unloaded": "Version unloaded",
    "conductor.shadowed": "Version tried beside the one in force",
    "conductor.canary": "Version given a share of the runs",
    "conductor.promoted": "Version put in force",
    "conductor.rolled_back": "Earlier version put in force",
    "tier.canary": "Share of a tier's runs served by something else",
    "tier.promoted": "Tier served by something else",
    "tier.rolled_back": "Tier served as before",
    "retention.set": "Engine started with these retention settings",
    "content.read": "Content read",
    "content.erased": "Content erased",
    "run.pruned": "Run pruned",
}
"""The words in which the list of changes describes each action. Actions of later releases are shown by their names."""
NAMES: Final[Mapping[str, str]] = {
    "all_tenants": "reaches all tenants",
    "classes": "other days for classes of runs",
    "concurrency": "open runs",
    "content": "days until texts are erased",
    "digest": "secret",
    "events": "days until runs are deleted",
    "max_usd": "dollars a run",
    "period": "each",
    "previous_digest": "earlier secret",
    "previous_until": "earlier secret works until",
    "rpm": "requests a minute",
    "shown": "mark of what was shown",
    "soft": "warns at",
    "tpm": "tokens a minute",
    "usd": "amount",
    "zone": "time zone",
}
"""The words for fields whose names do not say it already."""
MONEY: Final = frozenset({"usd", "max_usd"})
SHARES: Final = frozenset({"soft", "share"})
SECRETS: Final = frozenset({"digest", "previous_digest", "pepper"})


def action_text(change: Fields) -> str:
    """Return what was done."""
    return ACTION_TEXTS.get(change["action"], change["action"])


def change_facts(change: Fields) -> str:
    """Return the facts that a change has made others, each in a line of its own: of what is new those that say
    something, and of what is gone those that it had."""
    before, after = change["before"], change["after"]
    if before is not None and after is not None:
        return "\n".join(_describe_changes(before, after)) or NOTHING
    facts = after
    if facts is None:
        facts = before or {}
    lines: list[str] = []
    for name, value in facts.items():
        if _is_worth_showing(name, value):
            lines.append(_fact_line(name, value))
    return "\n".join(lines) or NOTHING


def _describe_changes(before: Fields, after: Fields) -> list[str]:
    lines: list[str] = []
    for name, value in after.items():
        if before.get(name) != value:
            lines.append(_change_line(name, before.get(name), value))
    return lines


def _is_worth_showing(name: str, value: object) -> bool:
    if name in MONEY:
        return value is not None  # an amount of nothing says something
    return name not in SECRETS and bool(value)


def _fact_line(name: str, value: object) -> str:
    return f"{_name(name)}: {_value(name, value)}"


def _change_line(name: str, was: object, now: object) -> str:
    if name in SECRETS:
        return f"{_name(name)}: another one"
    return f"{_name(name)}: was {_value(name, was)}, is {_value(name, now)}"


def _name(name: str) -> str:
    words = NAMES.get(name, name.replace("_", " "))
    return words[:1].upper() + words[1:]


def _yes_or_no(value: bool) -> str:
    if value:
        return "yes"
    return "no"


def _value(name: str, value: Any) -> str:
    if value in (None, "", []):
        return "none"
    if isinstance(value, bool):
        return _yes_or_no(value)
    if isinstance(value, list):
        return ", ".join([str(item) for item in value])
    if name in MONEY:
        return usd(value / MILLION)
    if name in SHARES:
        return f"{value * 100:g} %"
    if name.endswith(("_at", "_until")):
        return moment(value)
    return str(value)
