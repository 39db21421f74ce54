"""Declares `baton webhooks` with its options."""

from app.cli.commands.declarations import AS_JSON, COUNT, Group, argument, flag, group, option


def define(root: Group) -> None:
    """Define the commands."""
    webhooks = group(root, "webhooks", "List messages to the webhook that were given up, and send them again.")

    @webhooks.add("failed", "webhooks", "baton webhooks failed", "baton webhooks failed --json")
    @option("--limit", type=COUNT, default=100, help="The most messages to list.")
    @AS_JSON
    def failed() -> None:
        """List the messages that the receiver did not accept within three days, or refused with 410.

        They are kept for 30 days.
        """

    @webhooks.add("resend", "webhooks", "baton webhooks resend evt_0f9c", "baton webhooks resend --all")
    @argument("ids", "The ids that `baton webhooks failed` shows.", nargs=-1)
    @flag("--all", help="Send all of them.")
    @AS_JSON
    def resend() -> None:
        """Send messages again, under the same ids. A message older than three days is tried once."""
