"""Budgets over several runs: what may be spent for a key, a user, a team or a tenant in an hour, a day or a month (D7).

A *budget* is what an operator sets. An *account* is what is counted against it: the budget's own, or, for a budget of
everybody (`*`), one for each key, user or team that has no budget of its own for such a window. A *window* is an hour,
a day or a month of an account, in the time zone of the budget. Money is in micro-dollars, points in time are seconds
since 1970.
"""

import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal, get_args
from urllib.parse import quote
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from msgspec import Struct

Scope = Literal["key", "user", "team", "tenant"]
Period = Literal["hour", "day", "month"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PERIODS: tuple[Period, ...] = get_args(Period)
BudgetScope = Literal["key", "user", "team", "tenant", "shadow"]
"""The scopes of budgets. Nobody's request names `shadow`: such a budget is that of the shadows of one tier."""
ALL_TENANTS = "*"
"""Stands in the place of a tenant in the budget of a tier's shadows."""
EVERYBODY = "*"
"""The name of a budget that each key, user or team has which has none of its own."""
TEAM_FIELD = "team"
"""The field of a request's `metadata` that names the team."""
USER_FIELD = "user_id"
"""The field of a request's `metadata` that names the user, where nothing else does."""
LONGEST_NAME = 256
"""Characters of the name of a budget; a longer user or team has the budget of everybody."""
MOST_SLICES = 64
"""The most slices of an account."""
HOUR_SECONDS = 3_600
HASH_DIGITS = 16
"""Hexadecimal digits of a name that is hashed in the id of an account."""
NOBODY = "-"
"""Stands in ids for an empty name."""
SLICE = "+"
"""Stands between the id of an account and the number of one of its slices. No id of an account contains it."""


class Budget(Struct, frozen=True):
    """The amount that may be spent in each window.

    `name` is the key's public id, the user or the team as requests name them, `*` for each of them that has no budget
    of its own, empty for the tenant, and that of a tier for the shadows of its runs.
    """

    tenant: str
    scope: BudgetScope
    name: str
    period: Period
    usd: int
    zone: str = "UTC"
    """A time zone of the IANA database, such as `Europe/Berlin`."""
    soft: float | None = None
    """The share of the amount, above 0 and below 1, at which a warning is given once in each window."""
    created_at: float = 0.0
    slices: int | None = None
    """The number of slices in which each account is held, so that several processes change it at the same time; None:
    it is held as a whole."""

    @property
    def id(self) -> str:
        """Return the id: tenant, scope, name and period. There is one budget of each."""
        parts = (self.tenant, self.scope, self.name or NOBODY, self.period)
        return "/".join([quote(part, safe="@:*.-_") for part in parts])

    @property
    def label(self) -> str:
        """Return the words by which an error calls it, for example `the budget of the user alice for a day`."""
        if self.scope == "tenant":
            return f"the budget of the tenant for {_article(self.period)}"
        if self.name == EVERYBODY:
            return f"the budget of each {self.scope} for {_article(self.period)}"
        return f"the budget of the {self.scope} {self.name} for {_article(self.period)}"


def shadow_budget(tier: str, usd: int) -> Budget:
    """Return the budget of the shadows of a tier's runs, whoever's they are: so many micro-dollars in a day (UTC)."""
    return Budget(ALL_TENANTS, "shadow", tier, "day", usd)


def _article(period: Period) -> str:
    if period == "hour":
        return f"an {period}"
    return f"a {period}"


class Window(Struct, frozen=True):
    """The time from `start` until just before `end`."""

    start: int
    end: int


def window(period: Period, zone: str, at: float) -> Window:
    """Return the window of a period that a time falls into, by the clocks of a time zone.

    An hour is always 3,600 seconds and begins with one of the zone's standard time, so that hours follow each other
    where clocks are changed by half an hour; a day has an hour more or less where the clocks are changed.
    """
    second = int(at)
    local = datetime.fromtimestamp(second, ZoneInfo(zone))
    if period == "hour":
        standard = local - (local.dst() or timedelta())
        start = second - standard.minute * 60 - standard.second
        return Window(start, start + HOUR_SECONDS)
    day = local.replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    if period == "day":
        return Window(_seconds(day), _seconds(day + timedelta(days=1)))
    first = day.replace(day=1)
    following = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
    return Window(_seconds(first), _seconds(following))


def _seconds(local: datetime) -> int:
    return int(local.astimezone(UTC).timestamp())


def account(budget: Budget, name: str) -> str:
    """Return the id of the account of a key, user or team with this budget. Names of those that have no budget of
    their own are hashed in it."""
    if budget.name == EVERYBODY:
        return f"{budget.id}#{_hash_name(name)}"
    return budget.id


def slice_of(account_id: str, number: int) -> str:
    """Return the id of one of the slices of an account."""
    return f"{account_id}{SLICE}{number}"


def account_of_slice(account_id: str) -> str:
    """Return the id of the account that this is a slice of, or this id if it is no slice."""
    return account_id.partition(SLICE)[0]


def budget_id(account_id: str) -> str:
    """Return the id of the budget that an account, or a slice of one, belongs to."""
    return account_of_slice(account_id).partition("#")[0]


def scope_of(id_: str) -> str:
    """Return the scope of a budget or an account, for the labels of metrics."""
    return id_.split("/")[1]


def _hash_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:HASH_DIGITS]


def accounts(budgets: Iterable[Budget], names: Mapping[Scope, str]) -> tuple[str, ...]:
    """Return the accounts of a request, sorted, given the budgets of its tenant that may concern it.

    `names` are the request's key, user and team; a request without one counts as that of the empty name, so that no
    caller escapes a budget by leaving it out. A budget of its own replaces that of everybody for the same period.
    """
    chosen: dict[tuple[Scope, Period], Budget] = {}
    for budget in budgets:
        if budget.scope == "shadow":  # of no request
            continue
        place = (budget.scope, budget.period)
        subject_name = names.get(budget.scope, "")
        if budget.scope == "tenant" or (budget.name == subject_name and subject_name != EVERYBODY):
            chosen[place] = budget
        elif budget.name == EVERYBODY:
            chosen.setdefault(place, budget)
    return tuple(sorted(account(budget, names.get(scope, "")) for (scope, _), budget in chosen.items()))


def faults(budget: Budget) -> list[str]:
    """Return what is wrong with a budget, in words; empty if nothing is."""
    reasons = []
    if not budget.tenant:
        reasons.append("the tenant is empty")
    if (budget.scope == "tenant") != (not budget.name):
        reasons.append("a budget of a key, a user or a team needs a name, and that of a tenant has none")
    if len(budget.name) > LONGEST_NAME:
        reasons.append(f"the name has more than {LONGEST_NAME} characters")
    if budget.name in (".", ".."):
        reasons.append("the name is . or .., which clients remove from an address")
    if budget.usd < 0:
        reasons.append("the amount is negative")
    if budget.soft is not None and not 0 < budget.soft < 1:
        reasons.append("the soft limit is a share above 0 and below 1")
    if budget.slices is not None and not 2 <= budget.slices <= MOST_SLICES:
        reasons.append(f"the number of slices is from 2 to {MOST_SLICES}")
    if not _is_zone(budget.zone):
        reasons.append("the time zone is not in the IANA database; write one such as Europe/Berlin")
    return reasons


def _is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True
