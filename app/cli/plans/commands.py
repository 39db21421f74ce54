"""Declares `baton plan`, `baton plans` and `baton approvals` with their options."""

import click

from app.cli.declarations import (
    AS_JSON,
    COUNT,
    PLANNING,
    POOL,
    Finite,
    Group,
    argument,
    flag,
    group,
    in_order,
    option,
    repeatable,
)


def define(root: Group) -> None:
    """Define the commands."""
    _define_plan(root)
    _define_plans(root)
    _define_approvals(root)


def _define_plan(root: Group) -> None:
    @root.add(
        "plan",
        "plans.preview",
        'baton plan "Solve 3(x + 2) = 2x + 11" --tier baton-ultra',
        'baton plan "Summarise this contract." --label legal --effort high',
    )
    @in_order(PLANNING, POOL, AS_JSON)
    def plan() -> None:
        """Show how a question would be routed. Only the plan is made (and journaled); nothing is executed."""


PLAN = argument("plan", "A plan's id, its run's id, or last.", required=False, default="last")
REVISION = option("--revision", type=COUNT, help="The number of a revision (default: the latest).")
PLACE = click.IntRange(min=0)


def _define_plans(root: Group) -> None:
    plans = group(root, "plans", "Make plans without executing them, edit them, and execute them as they stand.")
    _define_making(plans)

    @plans.add("show", "plans.plans", "baton plans show last", "baton plans show plan_run_0199 --lists")
    @PLAN
    @REVISION
    @flag("--lists", help="Print the plan alone, as the three published lists in JSON.")
    @in_order(POOL, AS_JSON)
    def show() -> None:
        """Show a plan: its steps, what it would cost, and who would see what."""

    @plans.add(
        "edit",
        "plans.plans",
        'baton plans edit last --change 1 --worker rehearsal-sage --subtask "Check it, and give the final answer."',
        'baton plans edit last --add 0 --worker rehearsal-sage --subtask "Plan it." --access user',
        "baton plans edit plan_run_0199 --remove 2",
        "baton plans edit last --move 1 --to 0",
        "baton plans edit last --file plan.json",
    )
    @PLAN
    @option("--revision", type=COUNT, help="The revision that you have seen; refused if there is a later one.")
    @option("--change", type=PLACE, metavar="STEP", help="The step to change, counted from 0.")
    @option("--add", type=PLACE, metavar="STEP", help="Add a step before this one.")
    @option("--remove", type=PLACE, metavar="STEP", help="The step to remove.")
    @option("--move", type=PLACE, metavar="STEP", help="The step to move to the place --to.")
    @option("--to", type=PLACE, metavar="PLACE", help="The new place of the step that is moved.")
    @option("--worker", help="The worker of the step.")
    @option("--subtask", metavar="TEXT", help="The instruction of the step.")
    @option(
        "--access",
        metavar="LIST",
        may_be_empty=True,
        help="What the step sees: user and earlier steps, as in user,0,1.",
    )
    @option("--file", metavar="FILE", help="A whole plan in JSON in place of the steps; - reads it from input.")
    @in_order(POOL, AS_JSON)
    def edit() -> None:
        """Make a new revision of a plan, by one edit or by a whole plan."""

    @plans.add("run", "plans.plans", "baton plans run last", "baton plans run plan_run_0199 --revision 2 --json")
    @PLAN
    @REVISION
    @in_order(POOL, AS_JSON)
    def run() -> None:
        """Execute a revision of a plan as it stands, and print the answer."""


def _define_making(plans: Group) -> None:
    @plans.add(
        "make",
        "plans.plans",
        'baton plans make "Solve 3(x + 2) = 2x + 11" --tier baton-ultra',
        'baton plans make "Summarise this contract." --label legal --effort high',
    )
    @in_order(PLANNING, POOL, AS_JSON)
    def make() -> None:
        """Plan for a question, and execute nothing. `show`, `edit` and `run` go on from there."""


RUN = argument("run", "The id of a run whose plan waits, or the beginning of it.")
DIGEST = option("--digest", help="The digest that you have seen; without it, what waits now is decided on.")
REASON = option("--reason", default="", metavar="TEXT", help="The reason, which is kept with the decision.")


def _define_approvals(root: Group) -> None:
    approvals = group(root, "approvals", "List the plans that wait for an approval, and approve or refuse them.")

    @approvals.add("ls", "plans.approvals", "baton approvals ls", "baton approvals ls --decided --json")
    @flag("--decided", help="Those that were approved, refused, or not decided in time.")
    @option("--limit", type=COUNT, default=20, help="The most plans to list.")
    @AS_JSON
    def ls() -> None:
        """List the plans that wait, or that were decided, the newest runs first."""

    @approvals.add("show", "plans.approvals", "baton approvals show run_0199", "baton approvals show run_0199 --json")
    @RUN
    @in_order(POOL, AS_JSON)
    def show() -> None:
        """Show a plan: why it needs an approval, what it would disclose and cost, and what was decided."""

    @approvals.add(
        "approve",
        "plans.approvals",
        'baton approvals approve run_0199 --reason "Within the budget."',
        "baton approvals approve run_0199 --replacement claude --max-usd 0.50",
    )
    @RUN
    @DIGEST
    @REASON
    @repeatable("--replacement", metavar="WORKER", help="A worker that may be called besides those of the plan.")
    @option("--max-usd", type=Finite(min=0), help="What the run may cost in all (default: its worst case).")
    @in_order(POOL, AS_JSON)
    def approve() -> None:
        """Approve a plan. A running service goes on with it within a second."""

    @approvals.add("refuse", "plans.approvals", 'baton approvals refuse run_0199 --reason "Not with this provider."')
    @RUN
    @DIGEST
    @REASON
    @in_order(POOL, AS_JSON)
    def refuse() -> None:
        """Refuse a plan, which ends its run."""
