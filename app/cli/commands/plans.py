"""Declares `baton plans` with its options."""

import click

from app.cli.commands.declarations import (
    AS_JSON,
    COUNT,
    PLANNING,
    POOL,
    Group,
    argument,
    flag,
    group,
    in_order,
    option,
)

PLAN = argument("plan", "A plan's id, its run's id, or last.", required=False, default="last")
REVISION = option("--revision", type=COUNT, help="The number of a revision (default: the latest).")
PLACE = click.IntRange(min=0)


def define(root: Group) -> None:
    """Define the commands."""
    plans = group(root, "plans", "Make plans without executing them, edit them, and execute them as they stand.")
    _define_making(plans)

    @plans.add("show", "plans", "baton plans show last", "baton plans show plan_run_0199 --lists")
    @PLAN
    @REVISION
    @flag("--lists", help="Print the plan alone, as the three published lists in JSON.")
    @in_order(POOL, AS_JSON)
    def show() -> None:
        """Show a plan: its steps, what it would cost, and who would see what."""

    @plans.add(
        "edit",
        "plans",
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
    @option("--access", metavar="LIST", help="What the step sees: user and earlier steps, as in user,0,1.")
    @option("--file", metavar="FILE", help="A whole plan in JSON in place of the steps; - reads it from input.")
    @in_order(POOL, AS_JSON)
    def edit() -> None:
        """Make a new revision of a plan, by one edit or by a whole plan."""

    @plans.add("run", "plans", "baton plans run last", "baton plans run plan_run_0199 --revision 2 --json")
    @PLAN
    @REVISION
    @in_order(POOL, AS_JSON)
    def run() -> None:
        """Execute a revision of a plan as it stands, and print the answer."""


def _define_making(plans: Group) -> None:
    @plans.add(
        "make",
        "plans",
        'baton plans make "Solve 3(x + 2) = 2x + 11" --tier baton-ultra',
        'baton plans make "Summarise this contract." --label legal --effort high',
    )
    @in_order(PLANNING, POOL, AS_JSON)
    def make() -> None:
        """Plan for a question, and execute nothing. `show`, `edit` and `run` go on from there."""
