"""Declares `baton runs`, `baton replay` and `baton report` with their options."""

from typing import get_args

import click

from app.cli.declarations import (
    AS_JSON,
    COUNT,
    DOLLARS,
    POOL,
    SINCE,
    SPAN,
    Count,
    Finite,
    Group,
    argument,
    filter_options,
    flag,
    group,
    in_order,
    option,
    repeatable,
)
from app.core.run.kinds import RUN_STATES, OriginKind

VIEWS = ("tree", "graph", "timeline", "state")
VIEW = in_order(
    option(
        "--view",
        type=click.Choice(VIEWS),
        default="tree",
        help="What is drawn: the run with its texts, its graph, its timeline, or its exact state.",
    ),
    option(
        "--by", type=click.Choice(["time", "money"]), default="time", help="The measure of the bars of the timeline."
    ),
)
ORIGINS = tuple([kind for kind in get_args(OriginKind) if kind])

FOLLOWING = in_order(
    option(
        "--origin",
        type=click.Choice(["none", *ORIGINS]),
        help="Only runs that follow from another one in this way; none: those that follow from no other.",
    ),
    option("--origin-run", metavar="ID", help="Only runs that follow from this run."),
)
STATE = option("--state", type=click.Choice(RUN_STATES), help="Only runs of this state.")
FILTERS = in_order(
    filter_options("tier", "worker", "label", "topology", "model"),
    option("--user", help="Only runs whose request named this end user (user or safety_identifier)."),
    option("--metadata", metavar="FIELD=VALUE", help="Only runs whose request had this field in its metadata."),
    option("--key", help="Only runs of the key of this name or id."),
    filter_options("tenant"),
)


def define(root: Group) -> None:
    """Define the commands."""
    runs = group(root, "runs", "Read the journal of the configured database, or stop a run.")

    @runs.add(
        "ls",
        "runs.run_list",
        "baton runs ls --since 1h --state failed",
        "baton runs ls --tier baton-ultra --degraded --limit 50",
        "baton runs ls --request-id req_0199",
        "baton runs ls --sort cost --since 7d --topology tree",
        "baton runs ls --metadata team=search --min-cost 0.01",
        "baton runs ls --rated bad --since 7d",
        ends_with_reader=True,
    )
    @option("--limit", type=Count(1_000), default=20, help="The most runs to list, up to 1,000.")
    @in_order(STATE, FILTERS)
    @option("--min-cost", type=DOLLARS, help="Only runs that cost this many dollars or more.")
    @option("--max-cost", type=DOLLARS, help="Only runs that cost this many dollars or less.")
    @option("--request-id", metavar="ID", help="Only runs that the request with this x-request-id began or continued.")
    @option("--trace-id", metavar="ID", help="Only runs that a request of this trace began or continued.")
    @FOLLOWING
    @flag("--degraded", help="Only runs in which a fallback decided, a step was lost, or time or money ran short.")
    @option("--previews", type=click.Choice(["only", "none"]), help="Only plans not executed, or none of them.")
    @option("--rated", type=click.Choice(["good", "bad"]), help="Only runs whose ratings are good, or not, on average.")
    @option(
        "--queue", type=click.Choice(["untaken"]), help="Only runs that wait for an engine, or a step of which does."
    )
    @SINCE
    @option(
        "--sort",
        type=click.Choice(["time", "cost"]),
        default="time",
        help="The order; by cost only runs that have ended.",
    )
    @flag("--reverse", help="The oldest, or the cheapest, first.")
    @flag("--follow", help="Go on with a line for each run that is new on the list or has changed, until interrupted.")
    @AS_JSON
    def ls() -> None:
        """List runs, by default the newest first."""

    @runs.add("cancel", "runs.one_run", "baton runs cancel run_0199")
    @argument("run", "A run's id, or a prefix of one.")
    @AS_JSON
    def cancel() -> None:
        """Ask a run to end, whichever process has it, and wait for its end."""

    _define_looks(runs)
    _define_explain(runs)
    _define_diff(runs)
    _define_replay(root)
    _define_report(root)


def _define_looks(runs: Group) -> None:
    @runs.add(
        "show",
        "runs.one_run",
        "baton runs show last",
        "baton runs show run_0199 --full",
        "baton runs show last --view timeline --by money",
        "baton runs show last --view graph --at 12",
    )
    @argument("run", "A run's id, a prefix of one, the id of a reply, or last.", required=False, default="last")
    @flag("--full", help="Print whole texts instead of excerpts.")
    @VIEW
    @option("--at", type=COUNT, metavar="SEQ", help="The graph, timeline or state as it was after this event.")
    @option(
        "--seconds", type=Finite(min=0), help="The graph, timeline or state as it was this long after the admission."
    )
    @AS_JSON
    def show() -> None:
        """Explain one run: why it was routed so, and what each worker saw and answered."""

    @runs.add(
        "watch", "runs.one_run", "baton runs watch", "baton runs watch last --view timeline", ends_with_reader=True
    )
    @argument("run", "A run's id, a prefix of one, or last.", required=False, default="last")
    @VIEW
    @flag("--json", help="Print each event as a line of JSON.")
    def watch() -> None:
        """Follow a run's journal until it has ended, as lines or, with --view, as a drawing that is kept up to date."""


def _define_explain(runs: Group) -> None:
    @runs.add("proof", "audit.transparency_log", "baton runs proof last", "baton runs proof run_0199 --json")
    @argument("run", "A run's id, a prefix of one, the id of a reply, or last.", required=False, default="last")
    @AS_JSON
    def proof() -> None:
        """Check the proofs that the entries about a run are in the transparency log.

        Exits with 1 if one of them is not, or if there is no entry yet. `baton audit verify` compares the run itself
        with its entries.
        """

    @runs.add("explain", "runs.one_run", "baton runs explain last", "baton runs explain run_0199 --json")
    @argument("run", "A run's id, a prefix of one, the id of a reply, or last.", required=False, default="last")
    @AS_JSON
    def explain() -> None:
        """Explain one run in sentences: why this plan and these workers, its cost, and what nobody knows."""


def _define_diff(runs: Group) -> None:
    @runs.add("diff", "runs.replay", "baton runs diff run_0199 last")
    @argument("run", "A run's id, a prefix of one, the id of a reply, or last.")
    @argument("other", "The run to compare it with: its id, a prefix, the id of a reply, or last.")
    @AS_JSON
    def diff() -> None:
        """Compare two runs: answers, steps, cost, time, tokens, scores, and who saw what in one of them only."""


def _define_replay(root: Group) -> None:
    @root.add(
        "replay",
        "runs.replay",
        "baton replay last",
        "baton replay run_0199 --from-step 2 --under worker=luna",
        "baton replay --since 7d --tier baton-ultra --limit 100 --under tier=baton-mini --max-usd 5 --out tried.jsonl",
        "baton replay --since 1d --pool next.toml --json",
    )
    @argument("run", "Runs by id, prefix, id of a reply, or last.", required=False, nargs=-1)
    @in_order(SINCE, STATE, FILTERS)
    @option("--limit", type=COUNT, default=20, help="The most runs to replay.")
    @option("--seed", type=int, help="Draw them at random with this seed, in place of the newest ones.")
    @repeatable(
        "--under",
        metavar="NAME=VALUE",
        help="A change: tier, conductor (a worker), version (of the conductor), worker, plan (a JSON file), effort, "
        "snapshot (the digest of a stored pool).",
    )
    @option("--from-step", type=click.IntRange(0), metavar="N", help="Keep the outputs of the steps before this one.")
    @repeatable("--add-label", metavar="LABEL", help="A label besides those of the run.")
    @option("--max-usd", type=DOLLARS, help="The most that all replays may cost together.")
    @option("--concurrency", type=click.IntRange(1, 64), default=4, help="The replays at a time.")
    @option("--out", metavar="FILE", help="Append each pair as a line of JSON; runs that are in it are not replayed.")
    @in_order(POOL, AS_JSON)
    def replay() -> None:
        """Carry out past runs once more, as they were or with changes, and compare each with its replay."""


def _define_report(root: Group) -> None:
    @root.add(
        "report",
        "runs.report",
        "baton report --since 30d --by tier --by worker",
        "baton report --success graders --by week --zone Europe/Berlin --csv",
        "baton report --part failures --parquet failures.parquet",
    )
    @option("--since", type=SPAN, metavar="SPAN", default="7d", help="Only runs of the last 30m, 12h, 7d, ...")
    @option("--before", type=SPAN, metavar="SPAN", help="Only runs that began longer ago than 30m, 12h, 7d, ...")
    @repeatable(
        "--by", metavar="GROUPING", help="tier (default), tenant, key, user, metadata.FIELD, worker, topology, week."
    )
    @option(
        "--success",
        type=click.Choice(["feedback", "graders", "signals"]),
        default="feedback",
        help="What says that a query was successful: callers' feedback, graders, or what callers did.",
    )
    @option("--threshold", type=Finite(0, 1), default=0.5, help="The least score of a success.")
    @option("--zone", default="UTC", help="The time zone of weeks.")
    @FILTERS
    @option(
        "--part",
        type=click.Choice(["summary", "groups", "dearest", "failures"]),
        default="groups",
        help="The part of --csv and --parquet.",
    )
    @AS_JSON
    @flag("--csv", help="Print a part as CSV.")
    @option("--parquet", metavar="FILE", help="Write a part to a Parquet file; needs the extra `parquet`.")
    def report() -> None:
        """Report what a successful query cost, what the most expensive runs have in common, and what failed."""
