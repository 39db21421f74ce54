"""`baton keys`."""

from app.cli.commands.declarations import COUNT, DOLLARS, SPAN, Group, argument, flag, group, option, repeatable


def define(root: Group) -> None:
    """Define the commands."""
    keys = group(root, "keys", "Add, list and revoke API keys.")

    @keys.add(
        "add",
        "keys",
        "baton keys add ci --tier baton-mini --usd 0.25 --expires 30d",
        "baton keys add auditor --scope audit:read",
    )
    @argument("name", "What the key is for.")
    @option("--tenant", default="default", help="Whose runs it may see.")
    @flag("--all-tenants", help="Let its scopes reach the runs of every tenant.")
    @repeatable(
        "--scope",
        "scopes",
        metavar="SCOPE",
        help="runs:write, runs:read, audit:read or admin (default: runs:write and runs:read).",
    )
    @repeatable("--tier", "tiers", metavar="TIER", help="A tier that it may use (default: every tier).")
    @repeatable("--label", "labels", metavar="LABEL", help="A label that is put on each of its tasks.")
    @option("--usd", type=DOLLARS, help="The most that one run may cost, in dollars.")
    @option("--rpm", type=COUNT, help="Requests a minute.")
    @option("--tpm", type=COUNT, help="Tokens a minute, over all calls of its runs.")
    @option("--concurrency", type=COUNT, help="Requests at one time.")
    @option("--expires", type=SPAN, metavar="SPAN", help="Its lifetime, such as 12h, 30d or 52w.")
    def add() -> None:
        """Make a key. Its secret is shown once, on standard output."""

    @keys.add("ls", "keys", "baton keys ls")
    def ls() -> None:
        """List the keys, never their secrets."""

    @keys.add("revoke", "keys", "baton keys revoke 3f0c9a1e5b7d2c48")
    @argument("id", "The public id, between bt_ and the next underscore.")
    def revoke() -> None:
        """End a key. Gateways follow within five seconds."""
