"""Declares `baton conductor`, `baton shadow` and `baton tier` with their options."""

import click

from app.cli.declarations import (
    AS_JSON,
    COUNT,
    SHARE,
    SPAN,
    Group,
    argument,
    flag,
    group,
    in_order,
    option,
    repeatable,
)


def define(root: Group) -> None:
    """Define the commands."""
    _define_conductor(root)
    _define_shadow(root)
    _define_tier(root)


CONDUCTOR = argument("conductor", "The conductor's worker in the pool file.")
VERSION = argument("version", "The version, as `baton conductor ls` shows it.")
WHO = option(
    "--who",
    default="",
    show_default=False,
    help="The name under which the decision is recorded (default: the system's user).",
)


def _define_conductor(root: Group) -> None:
    conductor = group(root, "conductor", "Put a trained conductor into service.")
    _folders(conductor)
    _server(conductor)
    _versions(conductor)


def _folders(conductor: Group) -> None:
    @conductor.add("export", "promotion.conductor", "baton conductor export trained exported")
    @argument("trained", "The folder that `baton train` has left.")
    @argument("out", "A new folder.")
    @option("--title", default="world", help="The version's name, before the hash of its weights.")
    @option("--adapter-of", metavar="BASE", help="Write a LoRA adapter of this exported folder.")
    @option("--rank", type=COUNT, default=16, help="The rank of an adapter.")
    @AS_JSON
    def export() -> None:
        """Write a trained conductor as vLLM reads it, with its manifest. Needs torch."""

    @conductor.add(
        "describe",
        "promotion.conductor",
        "baton conductor describe model --title mine",
        "baton conductor describe adapter --base model",
    )
    @argument("folder", "The folder of weights, or of a LoRA adapter as peft saves it.")
    @option("--base", help="The described folder of the adapter's base (default: the folder is a whole model).")
    @option("--title", help="The version's name, before the hash of its weights (default: conductor).")
    @option(
        "--prompt",
        type=click.Choice(["general", "compact", "worded", "cards"]),
        help="The prompt that it reads (default: general).",
    )
    @option(
        "--grammar", type=click.Choice(["guidance", "xgrammar"]), help="The decoder of its plans (default: guidance)."
    )
    @option("--steps", type=COUNT, help="Steps of the longest plan (default: the base's, else 5).")
    @option("--workers", type=COUNT, help="Workers of the largest pool (default: the base's, else 8).")
    @option("--reward", help="The version of the reward that it was trained on.")
    @option("--commit", help="The commit of the code that trained it.")
    @option("--golden", metavar="FILE", help="JSON lines of golden prompts (default: the base's).")
    @AS_JSON
    def describe() -> None:
        """Write the manifest of a model or an adapter made elsewhere, or anew that of one that `baton train` has left.

        What no option names stays as it is in an existing manifest.
        """

    @conductor.add("sign", "promotion.conductor", "baton conductor sign adapter")
    @argument("folder", "The folder with weights and manifest.")
    @AS_JSON
    def sign() -> None:
        """Sign the manifest of a version with the key in BATON_CONDUCTOR_SIGNING_KEY.

        Where BATON_CONDUCTOR_SIGNERS names keys, only versions that one of them has signed are loaded and put into
        force.
        """


def _server(conductor: Group) -> None:
    @conductor.add(
        "serve",
        "promotion.conductor",
        "baton conductor serve exported --port 8001",
        "baton conductor serve exported --adapters --flag=--enforce-eager --dry-run",
    )
    @argument("folder", "The folder of the model.")
    @option("--name", default="conductor", help="Its name in the pool file, in addition to its version.")
    @option("--host", default="127.0.0.1", help="The address to listen on; callers must not reach it.")
    @option("--port", type=click.IntRange(1, 65_535), metavar="PORT", default=8000, help="The port to listen on.")
    @option("--context", type=COUNT, default=16_384, help="Tokens of context, if the model has so many.")
    @flag("--adapters", help="Let adapters be loaded and unloaded while it runs.")
    @option("--rank", type=COUNT, default=32, help="The highest rank of an adapter.")
    @option("--python", default="python3", help="The interpreter of the environment that has vLLM.")
    @flag("--dry-run", help="Print the command and do nothing.")
    @repeatable("--flag", help="A further argument of vLLM, such as --flag=--enforce-eager.")
    def serve() -> None:
        """Start vLLM with a described or exported model."""


def _versions(conductor: Group) -> None:
    @conductor.add("deploy", "promotion.conductor", "baton conductor deploy my-conductor adapter")
    @CONDUCTOR
    @argument("folder", "The folder with weights and manifest.")
    @option("--path", help="The same folder as the server sees it (default: as seen from here).")
    @in_order(WHO, AS_JSON)
    def deploy() -> None:
        """Load a version into a running vLLM, and into each of several endpoints, if it fits and passes."""

    @conductor.add("restore", "promotion.conductor", "baton conductor restore my-conductor")
    @in_order(CONDUCTOR, WHO, AS_JSON)
    def restore() -> None:
        """Load the deployed versions again where a server has lost them, as after its restart.

        Each is checked as by `deploy`, from its folder. Nothing is done where nothing is missing: run it each minute.
        """

    @conductor.add("shadow", "promotion.conductor", "baton conductor shadow my-conductor mine-1a2b3c --since 7d")
    @in_order(CONDUCTOR, VERSION)
    @option(
        "--since", type=SPAN, default=86_400.0, show_default="1d", metavar="SPAN", help="Runs of the last 30m, 7d, ..."
    )
    @option("--limit", type=COUNT, default=200, help="The most plans to compare.")
    @in_order(WHO, AS_JSON)
    def shadow() -> None:
        """Compare a version with the live one on finished runs."""

    @conductor.add("canary", "promotion.conductor", "baton conductor canary my-conductor mine-1a2b3c 0.05")
    @in_order(CONDUCTOR, VERSION)
    @argument("share", "The share of the runs, such as 0.05.", type=SHARE)
    @in_order(WHO, AS_JSON)
    def canary() -> None:
        """Let a version conduct a share of the runs."""

    @conductor.add("promote", "promotion.conductor", "baton conductor promote my-conductor mine-1a2b3c")
    @in_order(CONDUCTOR, VERSION)
    @option("--force", metavar="REASON", help="Promote it although conditions do not hold; the reason is recorded.")
    @in_order(WHO, AS_JSON)
    def promote() -> None:
        """Let a version conduct all runs, if the conditions of its tiers hold.

        Without `promotion` in the tiers that it conducts there are none. Exit status 1: a condition does not hold.
        """

    @conductor.add("rollback", "promotion.conductor", "baton conductor rollback my-conductor")
    @in_order(CONDUCTOR, WHO, AS_JSON)
    def rollback() -> None:
        """End the canary, or go back to the version that was live before."""

    @conductor.add("unload", "promotion.conductor", "baton conductor unload my-conductor mine-1a2b3c")
    @in_order(CONDUCTOR, VERSION, WHO, AS_JSON)
    def unload() -> None:
        """Unload a version that does not conduct from the server."""

    @conductor.add("ls", "promotion.conductor", "baton conductor ls")
    @option("--limit", type=COUNT, default=20, help="The most changes to list.")
    @AS_JSON
    def ls() -> None:
        """List the versions in force, and every change with its time and author."""


def _define_shadow(root: Group) -> None:
    shadow = group(root, "shadow", "Compare a tier's live runs with their shadows.")

    @shadow.add("report", "promotion.shadow_report", "baton shadow report baton-ultra --since 7d")
    @argument("tier", "The tier whose runs are compared with their shadows.")
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


TIER = argument("tier", "The tier whose runs are concerned; callers go on naming it.")
TO = option(
    "--to",
    required=True,
    metavar="SUBJECT",
    help="What serves it: another tier, or a worker that answers alone (`worker NAME` where a tier has the same name).",
)


def _define_tier(root: Group) -> None:
    tier = group(root, "tier", "Put another tier, or a worker alone, in the place of a tier.")

    @tier.add("canary", "promotion.tier", "baton tier canary baton-ultra --to baton-next --share 0.05")
    @in_order(TIER, TO)
    @option("--share", type=SHARE, required=True, help="The share of the runs, such as 0.05.")
    @in_order(WHO, AS_JSON)
    def canary() -> None:
        """Let another tier or a worker serve a share of a tier's runs."""

    @tier.add("promote", "promotion.tier", "baton tier promote baton-ultra --to baton-next")
    @in_order(TIER, TO)
    @option("--force", metavar="REASON", help="Promote it although conditions do not hold; the reason is recorded.")
    @in_order(WHO, AS_JSON)
    def promote() -> None:
        """Let another tier or a worker serve all of a tier's runs, if the conditions of the tier's promotion hold.

        Without `promotion` in the tier there are none. Exit status 1: a condition does not hold.
        """

    @tier.add("rollback", "promotion.tier", "baton tier rollback baton-ultra")
    @in_order(TIER, WHO, AS_JSON)
    def rollback() -> None:
        """End the canary, or go back to what served the tier before."""

    @tier.add("ls", "promotion.tier", "baton tier ls")
    @option("--limit", type=COUNT, default=20, help="The most changes to list.")
    @AS_JSON
    def ls() -> None:
        """List what serves each tier, and every change with its time and author."""
