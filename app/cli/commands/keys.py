"""Declares `baton keys` with its options."""

import click

from app.cli.commands.declarations import (
    AS_JSON,
    COUNT,
    DOLLARS,
    POOL,
    SPAN,
    Group,
    argument,
    flag,
    group,
    in_order,
    option,
    repeatable,
)
from app.core.roles import ROLES, SCOPES

DAY_SECONDS = 86_400.0
ROLE_NAMES = tuple(ROLES)
SCOPE_NAMES = ", ".join(SCOPES)


def define(root: Group) -> None:
    """Define the commands."""
    keys = group(root, "keys", "Add, list, rotate and revoke API keys.")
    _add(keys)
    _others(keys)


def _add(keys: Group) -> None:
    @keys.add(
        "add",
        "keys",
        "baton keys add ci --tier baton-mini --usd 0.25 --expires 30d",
        "baton keys add auditor --role auditor",
    )
    @argument("name", "What the key is for; unique among the tenant's keys in force.")
    @option("--tenant", default="default", help="Whose runs it may see.")
    @flag("--all-tenants", help="Let its scopes reach the runs of every tenant.")
    @repeatable("--role", "roles", type=click.Choice(ROLE_NAMES), help="A set of scopes (default: caller).")
    @repeatable("--scope", "scopes", metavar="SCOPE", help=f"A scope: {SCOPE_NAMES}.")
    @repeatable("--tier", "tiers", metavar="TIER", help="A tier that it may use (default: every tier).")
    @repeatable("--label", "labels", metavar="LABEL", help="A label that is put on each of its tasks.")
    @option("--usd", type=DOLLARS, help="The most that one run may cost, in dollars.")
    @option("--rpm", type=COUNT, help="Requests a minute.")
    @option("--tpm", type=COUNT, help="Tokens a minute, over all calls of its runs.")
    @option("--concurrency", type=COUNT, help="Runs that may be open at one time.")
    @option("--expires", type=SPAN, metavar="SPAN", help="Its lifetime, such as 12h, 30d or 52w.")
    @in_order(POOL, AS_JSON)
    def add() -> None:
        """Make a key. Its secret is shown once, on standard output."""


def _others(keys: Group) -> None:
    @keys.add("ls", "keys", "baton keys ls", "baton keys ls --json")
    @AS_JSON
    def ls() -> None:
        """List the keys, never their secrets."""

    @keys.add("show", "keys", "baton keys show ci")
    @argument("key", "The key's name, or its public id.")
    @AS_JSON
    def show() -> None:
        """Show one key with its limits, never its secret."""

    @keys.add("rotate", "keys", "baton keys rotate ci --overlap 7d", "baton keys rotate 3f0c9a1e5b7d2c48 --no-overlap")
    @argument("key", "The key's name, or its public id.")
    @option(
        "--overlap",
        type=SPAN,
        default=DAY_SECONDS,
        show_default="1d",
        metavar="SPAN",
        help="How long the old secret still works.",
    )
    @flag("--no-overlap", help="End the old secret at once, as for a leaked key; gateways follow within five seconds.")
    @AS_JSON
    def rotate() -> None:
        """Give a key a new secret, which is shown once.

        Id, name, limits and runs stay with the key. Until the overlap is over, both secrets work.
        """

    @keys.add("revoke", "keys", "baton keys revoke ci", "baton keys revoke 3f0c9a1e5b7d2c48")
    @argument("id", "The key's name, or its public id, which is between bt_ and the next underscore.")
    @AS_JSON
    def revoke() -> None:
        """End a key. Gateways follow within five seconds."""
