"""Declares `baton content-keys` with its options."""

from app.cli.commands.declarations import AS_JSON, Group, group


def define(root: Group) -> None:
    """Define the command."""
    keys = group(root, "content-keys", "Manage the keys under which contents are encrypted at rest.")

    @keys.add("rewrap", "content_keys", "baton content-keys rewrap")
    @AS_JSON
    def rewrap() -> None:
        """Encrypt the content keys of all tenants under the present master key.

        Run it when every process has the new first key in BATON_CONTENT_KEYS; the earlier one may be removed then.
        Contents are not rewritten.
        """
