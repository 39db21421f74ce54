"""Declares `baton retention` with its options."""

from app.cli.commands.declarations import AS_JSON, Group, group


def define(root: Group) -> None:
    """Define the commands."""
    retention = group(root, "retention", "Show how long texts and runs are kept.")

    @retention.add("show", "retention", "baton retention show")
    @AS_JSON
    def show() -> None:
        """Show after how many days texts are erased and runs deleted, by tenant, tier and label."""
