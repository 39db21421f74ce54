"""The rules of `BATON_OIDC_ROLES`: which claims of a person at the OpenID provider give which role.

    groups=baton-owners=>owner@*; groups=acme-ops=>operator@acme; email=ann@example.com=>auditor

Each rule names a claim, a value, and a role in a tenant: `*` for all tenants, `default` if none is named. The first
rule that fits counts.
"""

import re

from msgspec import Struct

from app.core.roles import ROLES

RULE = re.compile(r"([^=\s]+)=(.+)=>([a-z]+)(?:@(\*|[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}))?")


class RoleRule(Struct, frozen=True):
    """One rule. `tenant` is None for all tenants."""

    claim: str
    value: str
    role: str
    tenant: str | None


def role_rules(text: str) -> tuple[RoleRule, ...]:
    """Read the rules. Raises ValueError for a rule that cannot be read, with its number."""
    rules = []
    for number, part in enumerate(filter(None, map(str.strip, text.split(";"))), 1):
        match = RULE.fullmatch(part)
        if match is None:
            raise ValueError(f"rule {number} cannot be read; write it as claim=value=>role@tenant")
        claim, value, role, tenant = match.groups()
        if role not in ROLES:
            raise ValueError(f"rule {number} names no role; there are {', '.join(ROLES)}")
        rules.append(RoleRule(claim, value.strip(), role, None if tenant == "*" else tenant or "default"))
    return tuple(rules)
