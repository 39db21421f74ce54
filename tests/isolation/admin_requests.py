"""The requests of the operations of two tenants on the admin API: one for each of its routes.

The tenants' keys are owners of their tenants, not of all tenants, so that the routes of `SERVICE_WIDE` refuse them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.isolation.requests import DECISION, Chosen, IsolationRequest, Request, Tenant

POOL = (Path(__file__).parents[2] / "app/process/config/rehearsal.toml").read_text()
"""A pool file to compare with the one in force."""
VERSION = {"version": "v1"}
SUBJECT = {"subject": "baton-ultra"}
SERVICE_WIDE = frozenset(
    {
        ("POST", "/admin/v1/tenants"),
        ("POST", "/admin/v1/tenants/{tenant:path}/disable"),
        ("POST", "/admin/v1/tenants/{tenant:path}/enable"),
        ("POST", "/admin/v1/holds"),
        ("POST", "/admin/v1/holds/{hold}/release"),
        ("POST", "/admin/v1/conductors/{conductor}/canary"),
        ("POST", "/admin/v1/conductors/{conductor}/promote"),
        ("POST", "/admin/v1/conductors/{conductor}/rollback"),
        ("GET", "/admin/v1/conductors/{conductor}/evidence"),
        ("POST", "/admin/v1/tiers/{tier}/canary"),
        ("POST", "/admin/v1/tiers/{tier}/promote"),
        ("POST", "/admin/v1/tiers/{tier}/rollback"),
        ("GET", "/admin/v1/tiers/{tier}/evidence"),
    }
)
"""Routes that need a key of all tenants."""


def _list(_mine: Tenant, theirs: Tenant, chosen: Chosen) -> IsolationRequest:
    return IsolationRequest(chosen(["", f"?tenant={theirs.name}"]))


def _page(_mine: Tenant, _theirs: Tenant, _chosen: Chosen) -> IsolationRequest:
    return IsolationRequest("")


def _empty(_mine: Tenant, _theirs: Tenant, _chosen: Chosen) -> IsolationRequest:
    return IsolationRequest("", {})


def _version(_mine: Tenant, _theirs: Tenant, _chosen: Chosen) -> IsolationRequest:
    return IsolationRequest("", VERSION)


def _pool(_mine: Tenant, _theirs: Tenant, _chosen: Chosen) -> IsolationRequest:
    return IsolationRequest("", {"pool": POOL})


def _key(mine: Tenant, theirs: Tenant, chosen: Chosen) -> IsolationRequest:
    number = "".join([chosen(list("0123456789abcdef")) for _ in range(8)])
    return IsolationRequest(
        "", {"name": f"{mine.word}-{number}", "tenant": theirs.name, "roles": [chosen(["caller", "operator"])]}
    )


def _budget(mine: Tenant, theirs: Tenant, chosen: Chosen) -> IsolationRequest:
    whose: dict[str, Any] = {"scope": chosen(["user", "team"]), "name": mine.word, "tenant": theirs.name}
    return IsolationRequest("", whose | {"period": chosen(["hour", "day", "month"]), "usd": 1_000, "soft": 0.5})


def _changes(_mine: Tenant, theirs: Tenant, chosen: Chosen) -> IsolationRequest:
    ids = [*theirs.key_ids, *theirs.budgets]
    return IsolationRequest(
        chosen(["", f"?tenant={theirs.name}", f"?target={chosen(ids)}", f"?actor={chosen(theirs.key_ids)}"])
    )


def _spending(_mine: Tenant, theirs: Tenant, chosen: Chosen) -> IsolationRequest:
    return IsolationRequest(chosen(["", "?by=key", f"?tenant={theirs.name}&by=key"]))


def _use(_mine: Tenant, theirs: Tenant, chosen: Chosen) -> IsolationRequest:
    return IsolationRequest(chosen(["", f"?of={theirs.word}"]))


def _hold(_mine: Tenant, theirs: Tenant, chosen: Chosen) -> IsolationRequest:
    name = chosen([theirs.name, *theirs.runs])
    return IsolationRequest(
        "", {"scope": "tenant" if name == theirs.name else "run", "name": name, "reason": "case 12"}
    )


ADMIN_REQUESTS: Mapping[tuple[str, str], Request] = {
    ("GET", "/admin/v1/me"): _page,
    ("GET", "/admin/v1/keys"): _list,
    ("POST", "/admin/v1/keys"): _key,
    ("GET", "/admin/v1/keys/{key}"): _page,
    ("POST", "/admin/v1/keys/{key}/rotate"): _empty,
    ("POST", "/admin/v1/keys/{key}/revoke"): _empty,
    ("GET", "/admin/v1/tenants"): _page,
    ("POST", "/admin/v1/tenants"): lambda _mine, theirs, _: IsolationRequest("", {"name": theirs.name}),
    ("GET", "/admin/v1/tenants/{tenant:path}"): _page,
    ("POST", "/admin/v1/tenants/{tenant:path}/disable"): _empty,
    ("POST", "/admin/v1/tenants/{tenant:path}/enable"): _empty,
    ("GET", "/admin/v1/budgets"): _list,
    ("POST", "/admin/v1/budgets"): _budget,
    ("GET", "/admin/v1/budgets/{budget:path}"): _use,
    ("DELETE", "/admin/v1/budgets/{budget:path}"): _page,
    ("GET", "/admin/v1/changes"): _changes,
    ("GET", "/admin/v1/spend"): _spending,
    ("GET", "/admin/v1/holds"): _list,
    ("POST", "/admin/v1/holds"): _hold,
    ("GET", "/admin/v1/holds/{hold}"): _page,
    ("POST", "/admin/v1/holds/{hold}/release"): _empty,
    ("GET", "/admin/v1/people"): _page,
    ("GET", "/admin/v1/approvals"): _page,
    ("GET", "/admin/v1/approvals/{approval}"): _page,
    ("POST", "/admin/v1/approvals/{approval}"): lambda mine, _theirs, _: IsolationRequest(
        "", DECISION | {"reason": mine.word}
    ),
    ("GET", "/admin/v1/policy"): _page,
    ("POST", "/admin/v1/policy/check"): _pool,
    ("POST", "/admin/v1/policy/diff"): _pool,
    ("POST", "/admin/v1/policy/try"): _pool,
    ("GET", "/admin/v1/workers"): _page,
    ("GET", "/admin/v1/conductors"): _page,
    ("POST", "/admin/v1/conductors/{conductor}/canary"): lambda _m, _t, _: IsolationRequest(
        "", VERSION | {"share": 0.5}
    ),
    ("POST", "/admin/v1/conductors/{conductor}/promote"): _version,
    ("POST", "/admin/v1/conductors/{conductor}/rollback"): _empty,
    ("GET", "/admin/v1/conductors/{conductor}/evidence"): lambda _m, _t, _: IsolationRequest("?version=v1"),
    ("GET", "/admin/v1/tiers"): _page,
    ("POST", "/admin/v1/tiers/{tier}/canary"): lambda _m, _t, _: IsolationRequest("", SUBJECT | {"share": 0.5}),
    ("POST", "/admin/v1/tiers/{tier}/promote"): lambda _m, _t, _: IsolationRequest("", SUBJECT),
    ("POST", "/admin/v1/tiers/{tier}/rollback"): _empty,
    ("GET", "/admin/v1/tiers/{tier}/evidence"): lambda _m, _t, _: IsolationRequest("?subject=baton-ultra"),
}
