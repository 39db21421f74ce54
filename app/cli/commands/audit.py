"""`baton audit`."""

from app.cli.commands.declarations import AS_JSON, COUNT, SINCE, SPAN, Group, argument, group, in_order, option

CHOSEN = in_order(option("--run", help="Only the run of this id."), SINCE)


def define(root: Group) -> None:
    """Define the commands."""
    audit = group(root, "audit", "Check the journal against what Baton promises.")

    @audit.add("check", "audit", "baton audit check --since 7d", "baton audit check export.jsonl --json")
    @argument("file", "An export; without one, the configured database is read.", required=False)
    @option("--against", metavar="FILE", help="An earlier export or archive: report what is missing of it, or differs.")
    @AS_JSON
    @CHOSEN
    def check() -> None:
        """Report every contradiction that the journal shows.

        Exits with 0 if there is none, with 1 if there are some, and with 2 if the journal could not be read.
        """

    @audit.add("export", "audit", "baton audit export export.jsonl --since 30d")
    @argument("file", "The file to write; only its owner can read it.")
    @in_order(CHOSEN, AS_JSON)
    def export() -> None:
        """Write the journal, with callers' texts, to a file of JSON lines."""

    @audit.add("changes", "changes", "baton audit changes --since 7d", "baton audit changes --target 3f0c9a1e5b7d2c48")
    @option("--tenant", help="Only changes to this tenant and its keys.")
    @option("--target", help="Only changes to this key (by its id), tenant or conductor.")
    @option("--actor", help="Only changes that this key, person or user has made.")
    @option("--since", type=SPAN, metavar="SPAN", help="Only changes of the last 30m, 12h, 7d, ...")
    @option("--limit", type=COUNT, default=50, help="The most changes to list.")
    @AS_JSON
    def changes() -> None:
        """List who changed keys, tenants and conductors, the newest first."""

    @audit.add("rules", "audit", "baton audit rules")
    @AS_JSON
    def rules() -> None:
        """List the rules by name, with the promise that each stands for."""
