"""Declares `baton runs erase` and `prune`, `baton holds` and `baton retention` with their options."""

from app.cli.declarations import AS_JSON, SPAN, Group, argument, flag, group, option


def define(root: Group) -> None:
    """Define the commands. Those that remove runs stand in the group `runs`, which exists already."""
    runs = root.commands["runs"]
    assert isinstance(runs, Group)
    _define_removal(runs)
    _define_holds(root)
    _define_retention(root)


def _define_removal(runs: Group) -> None:
    @runs.add(
        "erase",
        "retention.erase",
        "baton runs erase --user ann@example.com --dry-run",
        "baton runs erase --tenant acme --before 90d",
        "baton runs erase --run run_0199",
    )
    @option("--run", metavar="RUN", help="Only this run: its id, a prefix of one, or last.")
    @option("--ref", metavar="HASH", help="Runs that have the text with this hash, which the journal names.")
    @option("--user", metavar="USER", help="Only runs whose request named this end user.")
    @option("--tenant", metavar="TENANT", help="Only runs of this tenant.")
    @option("--before", type=SPAN, metavar="SPAN", help="Only runs older than 90d, 12h, ...")
    @flag("--dry-run", help="Count the runs, and erase nothing.")
    @AS_JSON
    def erase() -> None:
        """Erase the texts of runs. Their journals stay: ids, states, times and money."""

    @runs.add("prune", "retention.prune", "baton runs prune --before 365d --dry-run", "baton runs prune --before 365d")
    @option("--before", type=SPAN, metavar="SPAN", required=True, help="Only runs that ended longer ago than 90d, ...")
    @flag("--dry-run", help="Count the runs, and delete nothing.")
    @AS_JSON
    def prune() -> None:
        """Delete runs that have ended, journal and all, but for a hash of each; archive them first (BATON_ARCHIVE)."""


def _define_holds(root: Group) -> None:
    holds = group(root, "holds", "Place, list and release legal holds, under which nothing of a run is erased.")

    @holds.add(
        "add",
        "retention.holds",
        'baton holds add --user ann@example.com --reason "case 12/2026"',
        'baton holds add --tenant acme --reason "audit of 2026"',
        'baton holds add --run run_0199 --reason "complaint 7"',
    )
    @option("--run", metavar="RUN", help="Hold this run: its id, a prefix of one, or last.")
    @option("--user", metavar="USER", help="Hold the runs of this end user; with --tenant, only those in the tenant.")
    @option("--tenant", metavar="TENANT", help="Hold the runs of this tenant.")
    @option("--key", metavar="KEY", help="Hold the runs of this key, by its name or public id.")
    @option("--reason", required=True, help="Why nothing of it may be erased.")
    @AS_JSON
    def add() -> None:
        """Place a legal hold: nobody erases, prunes or deletes the runs that it covers, later ones included.

        Content that was erased before cannot be brought back.
        """

    @holds.add("ls", "retention.holds", "baton holds ls", "baton holds ls --all --json")
    @flag("--all", "every", help="List those that were released, too.")
    @AS_JSON
    def ls() -> None:
        """List the legal holds in force, the newest first."""

    @holds.add("release", "retention.holds", "baton holds release hold_0199")
    @argument("hold", "The id that `baton holds ls` shows.")
    @AS_JSON
    def release() -> None:
        """Release a legal hold. Runs that no other hold covers are erased and pruned again when their time is over."""


def _define_retention(root: Group) -> None:
    retention = group(root, "retention", "Show how long texts and runs are kept.")

    @retention.add("show", "retention.periods", "baton retention show")
    @AS_JSON
    def show() -> None:
        """Show after how many days texts are erased and runs deleted, by tenant, tier and label."""
