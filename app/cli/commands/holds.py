"""Declares `baton holds` with its options."""

from app.cli.commands.declarations import AS_JSON, Group, argument, flag, group, option


def define(root: Group) -> None:
    """Define the commands."""
    holds = group(root, "holds", "Place, list and release legal holds, under which nothing of a run is erased.")

    @holds.add(
        "add",
        "holds",
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

    @holds.add("ls", "holds", "baton holds ls", "baton holds ls --all --json")
    @flag("--all", "every", help="List those that were released, too.")
    @AS_JSON
    def ls() -> None:
        """List the legal holds in force, the newest first."""

    @holds.add("release", "holds", "baton holds release hold_0199")
    @argument("hold", "The id that `baton holds ls` shows.")
    @AS_JSON
    def release() -> None:
        """Release a legal hold. Runs that no other hold covers are erased and pruned again when their time is over."""
