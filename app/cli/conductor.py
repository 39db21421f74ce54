"""`baton conductor VERB` takes a trained conductor from its checkpoint into service, and out of it again.

export, describe ......... make a folder ready to be served: `lab/export.py`, `lab/manifest.py`
sign ..................... sign the manifest, so that the folder can be told from others
serve .................... start vLLM for it
deploy, unload ........... load a version into a running vLLM, if it fits and its golden plans are right
restore .................. load the deployed versions again where a server has lost them
shadow ................... compare it with the live conductor on finished runs
canary, promote, rollback  choose the version that conducts; gateways follow within two seconds
ls ....................... print the version in force, and every change with its time and author
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from app.cli import deployment, event_loop, shadow, storage, terminal, train
from app.cli.asked import Asked
from app.cli.shadow_report import print_conditions
from app.core.pool.conductor_versions import Change, ChangeKind, VersionsInForce, refusal, versions_in_force
from app.core.transparency.notes import split_note
from app.engine.conductors import watch
from app.engine.conductors.trials import Judged
from app.engine.conductors.versions import Wanted, checked_change, conducted, make_change
from app.errors import ConfigInvalid
from app.lab import manifest
from app.process.conductor_server import conductor_servers, served_by_all
from app.process.config import Loaded, Settings, conductor_signer, configure, trusted_signers
from app.process.config import read as read_settings
from app.providers.vllm import Management
from app.store.protocol import Actor

KINDS: Mapping[str, ChangeKind] = {
    "canary": "canary",
    "promote": "promoted",
    "rollback": "rolled_back",
    "unload": "unloaded",
}


def run(asked: Asked, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs. Returns the exit status."""
    terminal.log_to_stderr("warning")
    if asked.verb == "serve":
        return deployment.serve(asked, environ)
    if asked.verb == "export":
        return _export(asked)
    if asked.verb == "describe":
        return _describe(asked)
    if asked.verb == "sign":
        return _sign(asked, environ)
    loaded = configure(environ)
    storage.announce(loaded.settings)
    if asked.verb == "ls":
        return _list(loaded.settings, asked.limit, as_json=asked.json)
    if asked.verb == "deploy":
        return _deploy(loaded, asked)
    if asked.verb == "restore":
        return _restore(loaded, asked)
    if asked.verb == "shadow":
        return _shadow(loaded, asked, now)
    return _change(loaded, asked, now)


def _export(asked: Asked) -> int:
    export = train.found("app.lab.export")
    source, out = export.trained(Path(asked.trained)), Path(asked.out)
    if asked.adapter_of is None:
        made = export.export(source, out, asked.title)
    else:
        made = export.export_adapter(source, Path(asked.adapter_of), out, asked.title, asked.rank)
    if asked.json:
        terminal.print_json({"version": made.name, "folder": asked.out, "evaluation": dict(made.evaluation)})
        return 0
    console = terminal.out()
    console.print(f"{made.name} in {asked.out}", markup=False)
    for split, found in made.evaluation.items():
        figures = f"reward {found['reward']:.3f}, right {found['right']:.3f}, ${found['usd']:.6f} a task"
        console.print(f"  {split}, {found['tasks']} tasks: {figures}", markup=False)
    return 0


def _describe(asked: Asked) -> int:
    given = ("title", "prompt", "grammar", "steps", "workers", "reward", "commit")
    facts = {name: getattr(asked, name) for name in given}
    base = Path(asked.base) if asked.base is not None else None
    golden = Path(asked.golden) if asked.golden is not None else None
    made = manifest.describe(Path(asked.folder), base, golden, **facts)
    if asked.json:
        terminal.print_json({"version": made.name, "base": made.base, "folder": asked.folder})
    else:
        terminal.out().print(f"{made.name}, of the base {made.base}", markup=False)
    return 0


def _sign(asked: Asked, environ: Mapping[str, str]) -> int:
    signer = conductor_signer(read_settings(environ))
    if signer is None:
        raise ConfigInvalid(["BATON_CONDUCTOR_SIGNING_KEY: is not set; `baton audit log --new-key NAME` makes a key"])
    made = manifest.sign(Path(asked.folder), signer)
    if asked.json:
        terminal.print_json({"version": made.name, "folder": asked.folder, "verifier": str(signer.verifier)})
    else:
        told = f"{made.name} is signed; those who load it need BATON_CONDUCTOR_SIGNERS={signer.verifier}"
        terminal.out().print(told, markup=False, soft_wrap=True)
    return 0


# -- versions


def _deploy(loaded: Loaded, asked: Asked) -> int:
    folder = Path(asked.folder)
    card, golden = manifest.read(folder)
    deployment.check_signature(folder, card, loaded.settings)
    deployment.check_fit(card, loaded, asked.conductor)
    with conductor_servers(loaded, asked.conductor) as servers:
        note = deployment.deploy(servers, folder, card, golden, asked.path or str(folder.resolve()))
    event_loop.run(_store(loaded.settings, asked, "loaded", card.name, note=note))
    if asked.json:
        terminal.print_json({"conductor": asked.conductor, "version": card.name, "checked": json.loads(note)})
        return 0
    console = terminal.out()
    console.print(f"{card.name} is loaded and fit: {_found(note)}", markup=False, soft_wrap=True)
    console.print(f"next: baton conductor shadow {asked.conductor} {card.name}", markup=False, soft_wrap=True)
    return 0


def _restore(loaded: Loaded, asked: Asked) -> int:
    """Load what was deployed into each server that lacks it, from the same folder, by the same checks."""
    changes = event_loop.run(_changes(loaded.settings))
    in_force = versions_in_force(changes).get(asked.conductor, VersionsInForce())
    with conductor_servers(loaded, asked.conductor) as servers:
        present = served_by_all(servers)
        missing = [version for version in in_force.loaded if version not in present]
        for version in missing:
            folder, path = _deployed_from(changes, asked.conductor, version)
            card, golden = manifest.read(folder)
            if card.name != version:
                raise ConfigInvalid([f"{folder}: is {card.name} by now, not {version}; deploy it as another version"])
            deployment.check_signature(folder, card, loaded.settings)
            note = deployment.deploy(servers, folder, card, golden, path)
            event_loop.run(_store(loaded.settings, asked, "loaded", version, note=note))
    if asked.json:
        terminal.print_json({"conductor": asked.conductor, "restored": missing})
    else:
        terminal.out().print(f"loaded again: {', '.join(missing) or 'nothing was missing'}", markup=False)
    return 0


def _deployed_from(changes: Sequence[Change], conductor: str, version: str) -> tuple[Path, str]:
    """The folder from which a version was deployed last, as seen from here and from its server."""
    notes = [one.note for one in changes if (one.conductor, one.kind, one.version) == (conductor, "loaded", version)]
    found = json.loads(notes[-1] or "{}")
    if "folder" not in found:
        raise ConfigInvalid([f"{version}: was deployed by an older Baton, which kept no folder; deploy it once more"])
    return Path(found["folder"]), found["path"]


def _shadow(loaded: Loaded, asked: Asked, now: Callable[[], float]) -> int:
    compared = shadow.Compared()
    with conductor_servers(loaded, asked.conductor) as servers:
        event_loop.run(_compare(loaded.settings, servers[0], asked, now(), compared))
    note = compared.as_json()
    event_loop.run(_store(loaded.settings, asked, "shadowed", asked.version, note=note))
    if asked.json:
        print(note, flush=True)
    else:
        terminal.out().print(f"{shadow.summary(note)}\n{note}", markup=False, soft_wrap=True)
    return 0


async def _compare(settings: Settings, server: Management, asked: Asked, now: float, compared: shadow.Compared) -> None:
    known = await _in_force(settings, asked.conductor)
    if reason := refusal(known, "shadowed", asked.version):
        raise ConfigInvalid([reason])
    async with storage.used(settings), storage.journals(settings) as archive:
        async for case in shadow.cases(archive, asked.conductor, now - asked.since, now, compared):
            if compared.plans >= asked.limit:
                break
            shadow.compare(server, asked.version, case, compared)


def _change(loaded: Loaded, asked: Asked, now: Callable[[], float]) -> int:
    kind, version = KINDS[asked.verb], getattr(asked, "version", "")
    if asked.conductor not in conducted(loaded.catalog):
        raise ConfigInvalid([f"{asked.conductor}: conducts no tier of the pool file"])
    wanted = Wanted(asked.conductor, kind, version, getattr(asked, "share", 0.0))
    refused = event_loop.run(_make(loaded, asked, wanted, now()))
    if refused:
        return _refuse(refused, as_json=asked.json)
    if kind == "unloaded":
        with conductor_servers(loaded, asked.conductor) as servers:
            for server in servers:
                server.unload(version)
    return _list(loaded.settings, 1, as_json=asked.json)


async def _make(loaded: Loaded, asked: Asked, wanted: Wanted, now: float) -> tuple[Judged, ...]:
    """Make a change of what conducts, if it is possible. Returns the evidence against a promotion that was not made."""

    def served() -> list[str]:
        with conductor_servers(loaded, wanted.conductor) as servers:
            return served_by_all(servers)

    async with storage.opened(loaded.settings) as store:
        possible = await checked_change(store, wanted, served, trusted_signers(loaded.settings), terminal.warn)
        forced = getattr(asked, "force", None)
        evidence = await watch.gate(store, loaded.catalog, possible, now)
        if not watch.held(evidence) and not forced:
            return evidence
        note = watch.note(evidence, forced=forced)
        await make_change(store, possible, name=_name(), by=_author(asked), note=note)
        return ()


def _refuse(evidence: tuple[Judged, ...], *, as_json: bool) -> int:
    """Print the conditions of a promotion that was not made."""
    if as_json:
        terminal.print_json({"promoted": False, "tiers": [one.to_json() for one in evidence]})
        return 1
    for one in evidence:
        terminal.out().print(f"{one.tier}, by its {one.source} runs:", markup=False)
        print_conditions(one.to_json()["conditions"])
    terminal.err().print(
        "Not promoted: not all conditions hold. --force REASON promotes it all the same.", markup=False
    )
    return 1


async def _store(settings: Settings, asked: Asked, kind: ChangeKind, version: str, note: str) -> None:
    """Store what was found about a version."""
    async with storage.opened(settings) as store:
        await make_change(store, Wanted(asked.conductor, kind, version), name=_name(), by=_author(asked), note=note)


def _name() -> str:
    return f"change_{time.time_ns():x}{secrets.token_hex(4)}"


def _author(asked: Asked) -> Actor:
    if asked.who:
        return Actor(asked.who, "command")
    return storage.operator()


async def _in_force(settings: Settings, conductor: str) -> VersionsInForce:
    async with storage.opened(settings) as store:
        return versions_in_force(await store.changes()).get(conductor, VersionsInForce())


def _list(settings: Settings, limit: int, *, as_json: bool) -> int:
    changes = event_loop.run(_changes(settings))
    if as_json:
        now_in_force = {name: asdict(now) for name, now in versions_in_force(changes).items()}
        terminal.print_json({"in_force": now_in_force, "changes": [asdict(one) for one in changes[-limit:]]})
        return 0
    console = terminal.out()
    for name, now in versions_in_force(changes).items():
        canary = f"; canary {now.canary} for {now.share:.0%} of the runs" if now.canary else ""
        live = now.live or "the pool file's own model"
        console.print(
            f"{name}: {live}{canary}; loaded: {', '.join(now.loaded) or 'none'}", markup=False, soft_wrap=True
        )
    table = terminal.table("at", "who", "conductor", "change", "version", "share", "found")
    for one in changes[-limit:]:
        at = terminal.second(one.at)
        share = f"{one.share:.0%}" if one.kind == "canary" else ""
        cells = (at, one.who, one.conductor, one.kind, one.version, share, _found(one.note))
        terminal.add_row(table, cells)
    console.print(table)
    return 0


def _found(note: str) -> str:
    """The findings about a version, with the name of the key that has signed it in place of the whole signature."""
    if '"signature"' not in note:
        return note
    facts = json.loads(note)
    _, signatures = split_note(facts.pop("signature"))
    return json.dumps({**facts, "signed_by": [name for name, _, _ in signatures]})


async def _changes(settings: Settings) -> tuple[Change, ...]:
    async with storage.opened(settings) as store:
        return await store.changes()
