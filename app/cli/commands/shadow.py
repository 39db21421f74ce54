"""Declares `baton shadow` with its options."""

from app.cli.commands.declarations import AS_JSON, SPAN, Group, argument, flag, group, in_order, option


def define(root: Group) -> None:
    """Define the commands."""
    shadow = group(root, "shadow", "Compare a tier's live runs with their shadows.")

    @shadow.add("report", "shadow_report", "baton shadow report baton-ultra --since 7d")
    @in_order(argument("tier", "The tier whose runs are compared with their shadows."))
    @option(
        "--since",
        type=SPAN,
        default=604_800.0,
        show_default="7d",
        metavar="SPAN",
        help="Shadows of the last 12h, 7d, 4w, ...",
    )
    @flag("--gate", help="Exit with 1 unless all conditions of the tier's promotion hold.")
    @AS_JSON
    def report() -> None:
        """Report how a tier's runs compare with their shadows: success, cost, time, who saw the caller's words.

        Each difference has an interval that holds at every look; the conditions of the tier's promotion are judged by
        it.
        """
