"""Commands about what operators have put in force: versions of conductors, and what serves tiers.

Changes of both are made and listed in the same way.
"""

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from msgspec.structs import asdict

from app.cli import storage, terminal
from app.cli.arguments import Arguments
from app.cli.promotion.shadow_report import print_conditions
from app.core.pool.conductor_versions import Change, VersionsInForce, versions_in_force
from app.core.pool.serving import tier_in
from app.core.transparency.notes import split_note
from app.engine.conductors import watch
from app.engine.conductors.trials import Judgement
from app.engine.conductors.versions import RequestedChange, make_change
from app.process.config import Configuration, Settings
from app.store.protocol import Actor, Store


async def change(
    config: Configuration, args: Arguments, check: Callable[[Store], Awaitable[RequestedChange]]
) -> tuple[Judgement, ...]:
    """Make the change that `check` finds possible. Returns the evidence against a promotion that was not made."""
    async with storage.open_configured_store(config.settings) as store:
        change_request = await check(store)
        force_reason = getattr(args, "force", None)
        evidence = await watch.gate(store, config.catalog, change_request)
        if not watch.may_be_promoted(evidence) and not force_reason:
            return evidence
        note = watch.evidence_note(evidence, forced=force_reason)
        await make_change(store, change_request, name=new_change_id(), by=author(args), note=note)
        return ()


def refuse(evidence: tuple[Judgement, ...], *, as_json: bool) -> int:
    """Print the conditions of a promotion that was not made. Returns the exit status, 1."""
    if as_json:
        terminal.print_json({"promoted": False, "tiers": [judgement.to_json() for judgement in evidence]})
        return 1
    for judgement in evidence:
        compared = f"by its {judgement.source} runs"
        if judgement.source == "none":
            compared = "without a run to compare"
        terminal.stdout().print(f"{judgement.tier}, {compared}:")
        print_conditions(judgement.to_json()["conditions"])
        if judgement.left_out:
            terminal.stdout().print(f"{watch.left_out_words(judgement.left_out)}.")
    terminal.stderr().print("Not promoted: not all conditions hold. --force REASON promotes it all the same.")
    return 1


def new_change_id() -> str:
    """Return the id of a new change."""
    return f"change_{time.time_ns():x}{secrets.token_hex(4)}"


def author(args: Arguments) -> Actor:
    """Return the author of a change: the name that is given, or the system's user."""
    if args.who:
        return Actor(args.who, "command")
    return storage.operator()


def show(
    history: Sequence[Change],
    limit: int,
    *,
    as_json: bool,
    words: Callable[[str, VersionsInForce], str],
    names: Iterable[str] = (),
) -> None:
    """Print what is in force after these changes, a line of `words` for each name, and the latest changes; with a line
    for each of `names`, whether or not something of it was changed."""
    in_force = {name: VersionsInForce() for name in names} | versions_in_force(history)
    if as_json:
        now_in_force = {name: asdict(now) for name, now in in_force.items()}
        terminal.print_json({"in_force": now_in_force, "changes": [asdict(change) for change in history[-limit:]]})
        return
    console = terminal.stdout()
    for name, now in in_force.items():
        console.print(words(name, now), soft_wrap=True)
    table = terminal.table("at", "who", "of", "change", "version", "share", "found")
    for change in history[-limit:]:
        at = terminal.second(change.at)
        share = ""
        if change.kind == "canary":
            share = _percent(change.share)
        cells = (
            at,
            change.who,
            tier_in(change.conductor) or change.conductor,
            change.kind,
            change.version,
            share,
            name_signers_in_findings(change.note),
        )
        terminal.add_row(table, cells)
    terminal.print_table(table, "Nothing was changed yet.")


def canary_text(now: VersionsInForce) -> str:
    """Return the canary in words; empty if there is none."""
    if not now.canary:
        return ""
    return f"; canary {now.canary} for {_percent(now.share)} of the runs"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def name_signers_in_findings(note: str) -> str:
    """Return the findings about a version, with the name of the key that has signed it in place of the whole
    signature."""
    if '"signature"' not in note:
        return note
    facts = json.loads(note)
    _, signatures = split_note(facts.pop("signature"))
    return json.dumps({**facts, "signed_by": [name for name, _, _ in signatures]})


async def read_changes(settings: Settings, *, of_tiers: bool) -> tuple[Change, ...]:
    """Return the changes of what serves the tiers, or else the changes of conductors' versions."""
    async with storage.open_configured_store(settings) as store:
        changes = await store.changes()
    return tuple([change for change in changes if bool(tier_in(change.conductor)) == of_tiers])
