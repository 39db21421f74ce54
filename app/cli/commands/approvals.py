"""Declares `baton approvals` with its options."""

import click

from app.cli.commands.declarations import (
    AS_JSON,
    COUNT,
    POOL,
    Group,
    argument,
    flag,
    group,
    in_order,
    option,
    repeatable,
)

RUN = argument("run", "The id of a run whose plan waits, or the beginning of it.")
DIGEST = option("--digest", help="The digest that you have seen; without it, what waits now is decided on.")
REASON = option("--reason", default="", metavar="TEXT", help="The reason, which is kept with the decision.")


def define(root: Group) -> None:
    """Define the commands."""
    approvals = group(root, "approvals", "List the plans that wait for an approval, and approve or refuse them.")

    @approvals.add("ls", "approvals", "baton approvals ls", "baton approvals ls --decided --json")
    @flag("--decided", help="Those that were approved, refused, or not decided in time.")
    @option("--limit", type=COUNT, default=20, help="The most plans to list.")
    @AS_JSON
    def ls() -> None:
        """List the plans that wait, or that were decided, the newest runs first."""

    @approvals.add("show", "approvals", "baton approvals show run_0199", "baton approvals show run_0199 --json")
    @RUN
    @in_order(POOL, AS_JSON)
    def show() -> None:
        """Show a plan: why it needs an approval, what it would disclose and cost, and what was decided."""

    @approvals.add(
        "approve",
        "approvals",
        'baton approvals approve run_0199 --reason "Within the budget."',
        "baton approvals approve run_0199 --replacement claude --max-usd 0.50",
    )
    @RUN
    @DIGEST
    @REASON
    @repeatable("--replacement", metavar="WORKER", help="A worker that may be called besides those of the plan.")
    @option("--max-usd", type=click.FloatRange(min=0), help="What the run may cost in all (default: its worst case).")
    @in_order(POOL, AS_JSON)
    def approve() -> None:
        """Approve a plan. A running service goes on with it within a second."""

    @approvals.add("refuse", "approvals", 'baton approvals refuse run_0199 --reason "Not with this provider."')
    @RUN
    @DIGEST
    @REASON
    @in_order(POOL, AS_JSON)
    def refuse() -> None:
        """Refuse a plan, which ends its run."""
