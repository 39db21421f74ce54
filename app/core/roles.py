"""The form of API keys; scopes, and the roles that are named sets of them: what a key or a person may do.

A scope permits one kind of request; deploy/docs/security.md has the routes of each. Every scope applies inside the
tenant of its key, unless the key is one of all tenants. The scopes in `SERVICE_WIDE` change what tenants share, so they
apply only to keys of all tenants.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

KEY_FORMAT: Final = re.compile(r"bt_([A-Za-z0-9]{4,32})_([A-Za-z0-9_-]{16,128})")
"""An API key: `bt_<public id>_<secret>`."""
KEY_FORM_TEXT: Final = "must look like bt_<4-32 letters or digits>_<16-128 letters, digits, - or _>"
"""The form in words, for faults."""
SCOPES: Final[Mapping[str, str]] = {
    "runs:write": "begin, cancel, rate and erase runs",
    "runs:read": "read runs without their content, and the answers of runs that the key itself began",
    "audit:read": "read the content of runs",
    "approvals:decide": "read plans that wait for an approval with their instructions, and approve or refuse them",
    "keys:read": "list keys, never their secrets",
    "keys:write": "make, rotate and revoke keys that may do no more than the one who makes them",
    "tenants:read": "list tenants",
    "tenants:write": "create, disable and enable tenants",
    "budgets:read": "read budgets and their use",
    "budgets:write": "set and remove budgets",
    "spend:read": "read what was spent",
    "workers:read": "read the workers with their measured state",
    "policy:read": "read the rules in force, and try a pool file",
    "conductors:read": "read the versions of conductors, and what serves tiers",
    "conductors:write": "choose the version that conducts, and what serves a tier",
    "changes:read": "read who changed what",
    "holds:read": "list legal holds",
    "holds:write": "place and release legal holds",
    "admin": "every scope",
}
"""Every scope with what it permits."""
SERVICE_WIDE: Final = frozenset({"tenants:write", "conductors:write", "holds:write"})
"""Scopes that need a key of all tenants."""
ROLES: Final[Mapping[str, frozenset[str]]] = {
    "owner": frozenset({"admin"}),
    "operator": frozenset(
        {
            "runs:write",
            "runs:read",
            "approvals:decide",
            "keys:read",
            "keys:write",
            "tenants:read",
            "budgets:read",
            "budgets:write",
            "spend:read",
            "workers:read",
            "policy:read",
            "conductors:read",
            "conductors:write",
            "changes:read",
            "holds:read",
        }
    ),
    "auditor": frozenset(
        {
            "runs:read",
            "audit:read",
            "keys:read",
            "tenants:read",
            "budgets:read",
            "spend:read",
            "workers:read",
            "policy:read",
            "conductors:read",
            "changes:read",
            "holds:read",
        }
    ),
    "developer": frozenset({"runs:write", "runs:read", "spend:read", "workers:read", "policy:read", "conductors:read"}),
    "caller": frozenset({"runs:write", "runs:read"}),
}
"""Every role with its scopes, the mightiest first."""


LATER: Final = frozenset({"approvals:decide"})
"""Scopes that roles have got since keys were made with them: a key without these still has its role's name, and does
not have the scopes."""


def permits(granted: frozenset[str], scope: str, *, all_tenants: bool) -> bool:
    """Return True if these scopes permit what `scope` stands for; `admin` carries every scope."""
    if scope in SERVICE_WIDE and not all_tenants:
        return False
    return scope in granted or "admin" in granted


def scopes_of(roles: Iterable[str], scopes: Iterable[str]) -> frozenset[str]:
    """Return the scopes of these roles, and these scopes. Raises KeyError for an unknown role."""
    return frozenset(scopes).union(*(ROLES[role] for role in roles))


def role_of(scopes: frozenset[str]) -> str:
    """Return the role that has exactly these scopes, or had them in an earlier release; empty if none has."""
    if "admin" in scopes:
        return "owner"
    return next((name for name, own in ROLES.items() if scopes in (own, own - LATER)), "")
