"""Declares `baton keys`, `tenants`, `content-keys`, `budgets` and `webhooks` with their options."""

import click

from app.cli.declarations import (
    AS_JSON,
    COUNT,
    DOLLARS,
    LABEL,
    POOL,
    SPAN,
    Dollars,
    Group,
    argument,
    flag,
    group,
    in_order,
    option,
    repeatable,
)
from app.core.roles import ROLES, SCOPES


def define(root: Group) -> None:
    """Define the commands."""
    _keys(root)
    _tenants(root)
    _content_keys(root)
    _budgets(root)
    _webhooks(root)


DAY_SECONDS = 86_400.0
ROLE_NAMES = tuple(ROLES)
SCOPE_NAMES = ", ".join(SCOPES)


def _keys(root: Group) -> None:
    keys = group(root, "keys", "Add, list, rotate and revoke API keys.")
    _add_key(keys)
    _other_keys(keys)


def _add_key(keys: Group) -> None:
    @keys.add(
        "add",
        "administration.keys",
        "baton keys add ci --tier baton-mini --usd 0.25 --expires 30d",
        "baton keys add auditor --role auditor",
    )
    @argument("name", "What the key is for; unique among the tenant's keys in force.")
    @option("--tenant", default="default", help="Whose runs it may see.")
    @flag("--all-tenants", help="Let its scopes reach the runs of every tenant.")
    @repeatable("--role", "roles", type=click.Choice(ROLE_NAMES), help="A set of scopes (default: caller).")
    @repeatable("--scope", "scopes", metavar="SCOPE", help=f"A scope: {SCOPE_NAMES}.")
    @repeatable("--tier", "tiers", metavar="TIER", help="A tier that it may use (default: every tier).")
    @repeatable("--label", "labels", type=LABEL, help="A label that is put on each of its tasks.")
    @option("--usd", type=DOLLARS, help="The most that one run may cost, in dollars.")
    @option("--rpm", type=COUNT, help="Requests a minute.")
    @option("--tpm", type=COUNT, help="Tokens a minute, over all calls of its runs.")
    @option("--concurrency", type=COUNT, help="Runs that may be open at one time.")
    @option("--expires", type=SPAN, metavar="SPAN", help="Its lifetime, such as 12h, 30d or 52w.")
    @in_order(POOL, AS_JSON)
    def add() -> None:
        """Make a key. Its secret is shown once, on standard output."""


def _other_keys(keys: Group) -> None:
    @keys.add("ls", "administration.keys", "baton keys ls", "baton keys ls --json")
    @AS_JSON
    def ls() -> None:
        """List the keys, never their secrets."""

    @keys.add("show", "administration.keys", "baton keys show ci")
    @argument("key", "The key's name, or its public id.")
    @AS_JSON
    def show() -> None:
        """Show one key with its limits, never its secret."""

    @keys.add(
        "rotate",
        "administration.keys",
        "baton keys rotate ci --overlap 7d",
        "baton keys rotate 3f0c9a1e5b7d2c48 --no-overlap",
    )
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

    @keys.add("revoke", "administration.keys", "baton keys revoke ci", "baton keys revoke 3f0c9a1e5b7d2c48")
    @argument("id", "The key's name, or its public id, which is between bt_ and the next underscore.")
    @AS_JSON
    def revoke() -> None:
        """End a key. Gateways follow within five seconds."""


def _tenants(root: Group) -> None:
    tenants = group(root, "tenants", "List, create, disable and enable tenants.")

    @tenants.add("ls", "administration.tenants", "baton tenants ls")
    @AS_JSON
    def ls() -> None:
        """List the tenants that were created, or that have keys."""

    @tenants.add("add", "administration.tenants", "baton tenants add acme")
    @argument("tenant", "The tenant's name.")
    @AS_JSON
    def add() -> None:
        """Create a tenant. A key that is made for a tenant needs no such command."""

    @tenants.add("disable", "administration.tenants", "baton tenants disable acme")
    @argument("tenant", "The tenant's name.")
    @AS_JSON
    def disable() -> None:
        """Accept none of a tenant's keys; gateways follow within five seconds. Runs that have begun go on."""

    @tenants.add("enable", "administration.tenants", "baton tenants enable acme")
    @argument("tenant", "The tenant's name.")
    @AS_JSON
    def enable() -> None:
        """Accept a tenant's keys again."""


def _content_keys(root: Group) -> None:
    keys = group(root, "content-keys", "Manage the keys under which contents are encrypted at rest.")

    @keys.add("rewrap", "administration.content_keys", "baton content-keys rewrap")
    @AS_JSON
    def rewrap() -> None:
        """Encrypt the content keys of all tenants under the present master key.

        Run it when every process has the new first key in BATON_CONTENT_KEYS; the earlier one may be removed then.
        Contents are not rewritten.
        """


PERIODS = ("hour", "day", "month")


def _budgets(root: Group) -> None:
    budgets = group(root, "budgets", "Set, list, show and remove budgets over several runs.")
    _set_budget(budgets)
    _other_budgets(budgets)


def _set_budget(budgets: Group) -> None:
    @budgets.add(
        "set",
        "administration.budgets",
        "baton budgets set 500 --per month --tenant acme --zone Europe/Berlin --soft 0.8",
        "baton budgets set 2.50 --per day --user '*'",
        "baton budgets set 20 --per day --key ci",
    )
    @argument("usd", "The dollars that may be spent in each window; 0: nothing.", type=Dollars(or_nothing=True))
    @option("--per", type=click.Choice(PERIODS), default="day", help="The length of a window.")
    @option("--tenant", default="default", help="Whose budget it is; without a key, user or team it is the tenant's.")
    @option("--key", help="The key that has it, by name or public id; * for each key without a budget of its own.")
    @option("--user", help="The user that has it, as requests name it; * for each user without a budget of its own.")
    @option("--team", help="The team that has it, as `metadata.team` names it; * for each without a budget of its own.")
    @option("--zone", default="UTC", metavar="ZONE", help="The time zone whose clocks begin the windows.")
    @option("--soft", type=float, metavar="SHARE", help="The share at which a warning is given, such as 0.8.")
    @option("--slices", type=COUNT, metavar="N", help="Hold each account in N parts, 2 to 64, for many busy engines.")
    @AS_JSON
    def set_() -> None:
        """Set a budget, or change the amount, time zone, soft limit and slices of one.

        Gateways follow within two seconds. A run that has begun keeps the budgets that it was admitted with.
        """


def _other_budgets(budgets: Group) -> None:
    @budgets.add("ls", "administration.budgets", "baton budgets ls", "baton budgets ls --tenant acme --json")
    @option("--tenant", help="Only budgets of this tenant.")
    @AS_JSON
    def ls() -> None:
        """List the budgets with what is spent and held of them in the present windows."""

    @budgets.add(
        "show",
        "administration.budgets",
        "baton budgets show acme/tenant/-/month",
        "baton budgets show 'acme/user/*/day' --of alice",
    )
    @argument("budget", "The id that `baton budgets ls` shows.")
    @option("--of", metavar="NAME", help="Only the account of this key (its public id), user or team.")
    @option("--windows", type=COUNT, default=20, help="How many windows to show.")
    @AS_JSON
    def show() -> None:
        """Show one budget and the windows of its accounts, the newest first.

        A budget of everybody (*) has one account for each key, user or team, whose name is hashed in it.
        """

    @budgets.add("rm", "administration.budgets", "baton budgets rm 'acme/user/*/day'")
    @argument("budget", "The id that `baton budgets ls` shows.")
    @AS_JSON
    def rm() -> None:
        """Remove a budget. What was spent counts again if it is set again within the window."""


def _webhooks(root: Group) -> None:
    webhooks = group(root, "webhooks", "List messages to the webhook that were given up, and send them again.")

    @webhooks.add("failed", "administration.webhooks", "baton webhooks failed", "baton webhooks failed --json")
    @option("--limit", type=COUNT, default=100, help="The most messages to list.")
    @AS_JSON
    def failed() -> None:
        """List the messages that the receiver did not accept within about three days, or refused with 410.

        They are kept for 30 days.
        """

    @webhooks.add("resend", "administration.webhooks", "baton webhooks resend evt_0f9c", "baton webhooks resend --all")
    @argument("ids", "The ids that `baton webhooks failed` shows.", nargs=-1)
    @flag("--all", help="Send all of them.")
    @AS_JSON
    def resend() -> None:
        """Send messages again, under the same ids, as often as new ones."""
