"""Declares `baton policy` with its options."""

from app.cli.commands.declarations import AS_JSON, SINCE, Group, argument, group, in_order


def define(root: Group) -> None:
    """Define the commands."""
    policy = group(root, "policy", "Show who may see which requests, and what a change would allow.")

    @policy.add("check", "policy", "baton policy check", "baton policy check pool.toml --json")
    @argument("file", "A pool file; without one, the configured pool is read.", required=False)
    @AS_JSON
    def check() -> None:
        """List who may see requests with each label, by tier, and rules that have no effect."""

    @policy.add("diff", "policy", "baton policy diff old.toml new.toml")
    @argument("old", "The pool file in force.")
    @argument("new", "The pool file that is to replace it.")
    @AS_JSON
    def diff() -> None:
        """Prove that a new pool file shows nothing to more recipients, or name who would see what.

        Enumerates every set of labels for every tier and recipient. Exits with 0 if nothing is shown to more
        recipients, else with 1.
        """

    @policy.add("try", "policy", "baton policy try new.toml --since 7d")
    @argument("file", "The pool file to try.")
    @in_order(SINCE, AS_JSON)
    def try_() -> None:
        """Apply a pool file to the labels of past runs: list whose calls it would have refused.

        Exits with 0 if it would have refused none, else with 1.
        """
