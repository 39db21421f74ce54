"""Declares `baton tier` with its options."""

from app.cli.commands.conductor import WHO
from app.cli.commands.declarations import AS_JSON, COUNT, SHARE, Group, argument, group, in_order, option

TIER = argument("tier", "The tier whose runs are concerned; callers go on naming it.")
TO = option(
    "--to",
    required=True,
    metavar="SUBJECT",
    help="What serves it: another tier, or a worker that answers alone (`worker NAME` where a tier has the same name).",
)


def define(root: Group) -> None:
    """Define the commands."""
    tier = group(root, "tier", "Put another tier, or a worker alone, in the place of a tier.")

    @tier.add("canary", "tier", "baton tier canary baton-ultra --to baton-next --share 0.05")
    @in_order(TIER, TO)
    @option("--share", type=SHARE, required=True, help="The share of the runs, such as 0.05.")
    @in_order(WHO, AS_JSON)
    def canary() -> None:
        """Let another tier or a worker serve a share of a tier's runs."""

    @tier.add("promote", "tier", "baton tier promote baton-ultra --to baton-next")
    @in_order(TIER, TO)
    @option("--force", metavar="REASON", help="Promote it although conditions do not hold; the reason is recorded.")
    @in_order(WHO, AS_JSON)
    def promote() -> None:
        """Let another tier or a worker serve all of a tier's runs, if the conditions of the tier's promotion hold.

        Without `promotion` in the tier there are none. Exit status 1: a condition does not hold.
        """

    @tier.add("rollback", "tier", "baton tier rollback baton-ultra")
    @in_order(TIER, WHO, AS_JSON)
    def rollback() -> None:
        """End the canary, or go back to what served the tier before."""

    @tier.add("ls", "tier", "baton tier ls")
    @option("--limit", type=COUNT, default=20, help="The most changes to list.")
    @AS_JSON
    def ls() -> None:
        """List what serves each tier, and every change with its time and author."""
