"""Declares `baton budgets` with its options."""

import click

from app.cli.commands.declarations import AS_JSON, COUNT, Dollars, Group, argument, group, option

PERIODS = ("hour", "day", "month")


def define(root: Group) -> None:
    """Define the commands."""
    budgets = group(root, "budgets", "Set, list, show and remove budgets over several runs.")
    _set(budgets)
    _others(budgets)


def _set(budgets: Group) -> None:
    @budgets.add(
        "set",
        "budgets",
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


def _others(budgets: Group) -> None:
    @budgets.add("ls", "budgets", "baton budgets ls", "baton budgets ls --tenant acme --json")
    @option("--tenant", help="Only budgets of this tenant.")
    @AS_JSON
    def ls() -> None:
        """List the budgets with what is spent and held of them in the present windows."""

    @budgets.add(
        "show", "budgets", "baton budgets show acme/tenant/-/month", "baton budgets show 'acme/user/*/day' --of alice"
    )
    @argument("budget", "The id that `baton budgets ls` shows.")
    @option("--of", metavar="NAME", help="Only the account of this key (its public id), user or team.")
    @option("--windows", type=COUNT, default=20, help="How many windows to show.")
    @AS_JSON
    def show() -> None:
        """Show one budget and the windows of its accounts, the newest first.

        A budget of everybody (*) has one account for each key, user or team, whose name is hashed in it.
        """

    @budgets.add("rm", "budgets", "baton budgets rm 'acme/user/*/day'")
    @argument("budget", "The id that `baton budgets ls` shows.")
    @AS_JSON
    def rm() -> None:
        """Remove a budget. What was spent counts again if it is set again within the window."""
