"""The rules that give roles to people, and the settings of logins that belong together."""

import pytest

from app.errors import ConfigInvalid
from app.process.config import read
from app.process.config.role_rules import RoleRule, role_rules

WHOLE = {
    "BATON_ADMIN_PORT": "9091",
    "BATON_ADMIN_URL": "https://admin.example.com/",
    "BATON_OIDC_ISSUER": "https://id.example.com/",
    "BATON_OIDC_CLIENT_ID": "baton",
    "BATON_OIDC_CLIENT_SECRET": "hunter2",
    "BATON_OIDC_ROLES": "groups=a=b=>owner@*; email=ann@example.com=>auditor ;groups=cn=x,dc=y=>operator@acme:eu;",
}


def test_rules_name_a_claim_a_value_a_role_and_a_tenant() -> None:
    assert role_rules(WHOLE["BATON_OIDC_ROLES"]) == (
        RoleRule("groups", "a=b", "owner", None),
        RoleRule("email", "ann@example.com", "auditor", "default"),
        RoleRule("groups", "cn=x,dc=y", "operator", "acme:eu"),
    )
    assert role_rules("") == ()


def test_the_settings_of_logins_are_read() -> None:
    settings = read(WHOLE)
    assert (settings.admin_url, settings.oidc_issuer) == ("https://admin.example.com", "https://id.example.com/")
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"BATON_OIDC_ROLES": "groups=x=>root"}, "BATON_OIDC_ROLES: rule 1 names no role"),
        ({"BATON_OIDC_ROLES": "groups=x=>owner;groups"}, "BATON_OIDC_ROLES: rule 2 cannot be read"),
        ({"BATON_OIDC_ROLES": ""}, "BATON_OIDC_ROLES: is not set"),
        ({"BATON_ADMIN_PORT": ""}, "BATON_ADMIN_PORT: is not set"),
        ({"BATON_ADMIN_URL": ""}, "BATON_ADMIN_URL: is not set"),
        ({"BATON_OIDC_CLIENT_ID": ""}, "BATON_OIDC_CLIENT_ID: is not set"),
        ({"BATON_OIDC_ISSUER": ""}, "BATON_OIDC_CLIENT_ID: is set without BATON_OIDC_ISSUER"),
        ({"BATON_OIDC_ISSUER": ""}, "BATON_ADMIN_URL: is set without BATON_OIDC_ISSUER"),
        ({"BATON_OIDC_ISSUER": "id.example.com"}, "BATON_OIDC_ISSUER: is not an HTTP URL"),
    ],
)
def test_what_is_missing_or_wrong_is_said(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        read(WHOLE | changes)
    assert any(fault.startswith(message) for fault in caught.value.faults), caught.value.faults
    assert "hunter2" not in str(caught.value)
