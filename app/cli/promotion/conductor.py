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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.learning import train
from app.cli.promotion import deployment, shadow_plans, version_changes
from app.core.pool.conductor_versions import Change, ChangeKind, VersionsInForce, refusal, versions_in_force
from app.engine.conductors.versions import RequestedChange, check_change, conductor_names, make_change
from app.errors import BatonError, ConfigInvalid
from app.lab import manifest
from app.process.conductor_server import conductor_servers, find_common_models
from app.process.config import Configuration, Settings, conductor_signer, configure, trusted_signers
from app.process.config import read as read_settings
from app.providers.vllm import Management
from app.store.protocol import Store

KINDS: Mapping[str, ChangeKind] = {
    "canary": "canary",
    "promote": "promoted",
    "rollback": "rolled_back",
    "unload": "unloaded",
}


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs. Returns the exit status."""
    terminal.log_to_stderr("warning")
    if args.verb == "serve":
        return deployment.serve(args, environ)
    if args.verb == "export":
        return _export(args)
    if args.verb == "describe":
        return _describe(args)
    if args.verb == "sign":
        return _sign(args, environ)
    config = configure(environ)
    storage.print_database(config.settings)
    if args.verb == "ls":
        return _list(config.settings, args.limit, as_json=args.json)
    if args.verb == "deploy":
        return _deploy(config, args)
    if args.verb == "restore":
        return _restore(config, args)
    if args.verb == "shadow":
        return _shadow(config, args, now)
    return _change(config, args)


def _export(args: Arguments) -> int:
    export = train.import_object("app.lab.export")
    source, out = export.read_training(Path(args.trained)), Path(args.out)
    if args.adapter_of is None:
        card = export.export(source, out, args.title)
    else:
        card = export.export_adapter(source, Path(args.adapter_of), out, args.title, args.rank)
    if args.json:
        terminal.print_json({"version": card.name, "folder": args.out, "evaluation": dict(card.evaluation)})
        return 0
    console = terminal.stdout()
    console.print(f"{card.name} in {args.out}")
    for split, means in card.evaluation.items():
        figures = f"reward {means['reward']:.3f}, right {means['right']:.3f}, ${means['usd']:.6f} a task"
        console.print(f"  {split}, {means['tasks']} tasks: {figures}")
    return 0


def _describe(args: Arguments) -> int:
    fields = ("title", "prompt", "grammar", "steps", "workers", "reward", "commit")
    facts = {name: getattr(args, name) for name in fields}
    base, golden = None, None
    if args.base is not None:
        base = Path(args.base)
    if args.golden is not None:
        golden = Path(args.golden)
    card = manifest.describe(Path(args.folder), base, golden, **facts)
    if args.json:
        terminal.print_json({"version": card.name, "base": card.base, "folder": args.folder})
    else:
        terminal.stdout().print(f"{card.name}, of the base {card.base}")
    return 0


def _sign(args: Arguments, environ: Mapping[str, str]) -> int:
    signer = conductor_signer(read_settings(environ))
    if signer is None:
        raise ConfigInvalid(["BATON_CONDUCTOR_SIGNING_KEY: is not set; `baton audit log --new-key NAME` makes a key"])
    card = manifest.sign(Path(args.folder), signer)
    if args.json:
        terminal.print_json({"version": card.name, "folder": args.folder, "verifier": str(signer.verifier)})
    else:
        message = f"{card.name} is signed; those who load it need BATON_CONDUCTOR_SIGNERS={signer.verifier}"
        terminal.stdout().print(message, soft_wrap=True)
    return 0


# -- versions


def _deploy(config: Configuration, args: Arguments) -> int:
    folder = Path(args.folder)
    card, golden = manifest.read(folder)
    deployment.check_signature(folder, card, config.settings)
    deployment.check_fit(card, config, args.conductor)
    with conductor_servers(config, args.conductor) as servers:
        note = deployment.deploy(servers, folder, card, golden, args.path or str(folder.resolve()))
    event_loop.run(_store(config.settings, args, "loaded", card.name, note=note))
    if args.json:
        terminal.print_json({"conductor": args.conductor, "version": card.name, "checked": json.loads(note)})
        return 0
    console = terminal.stdout()
    findings = version_changes.name_signers_in_findings(note)
    console.print(f"{card.name} is loaded and checked: {findings}", soft_wrap=True)
    console.print(f"next: baton conductor shadow {args.conductor} {card.name}", soft_wrap=True)
    return 0


def _restore(config: Configuration, args: Arguments) -> int:
    """Load what was deployed into each server that lacks it, from the same folder, by the same checks.

    What conducts comes first. A server that does not answer, or a version that cannot be loaded, keeps no other from
    being restored; they are reported at the end.
    """
    changes = event_loop.run(version_changes.read_changes(config.settings, of_tiers=False))
    in_force = versions_in_force(changes).get(args.conductor, VersionsInForce())
    restored: list[str] = []
    faults: list[str] = []
    with conductor_servers(config, args.conductor) as servers:
        models: list[tuple[Management, list[str]]] = []
        for server in servers:
            try:
                models.append((server, server.models()))
            except BatonError as error:
                faults += _faults_of(error)
        for version in sorted(in_force.loaded, key=lambda name: name not in (in_force.live, in_force.canary)):
            lacking = [server for server, names in models if version not in names]
            try:
                if lacking:
                    _load_again(config, args, changes, version, lacking)
                    restored.append(version)
            except BatonError as error:
                faults += _faults_of(error)
    if args.json:
        terminal.print_json({"conductor": args.conductor, "restored": restored})
    elif restored or not faults:
        terminal.stdout().print(f"loaded again: {', '.join(restored) or 'nothing was missing'}")
    if faults:
        raise ConfigInvalid(faults)
    return 0


def _faults_of(error: BatonError) -> Sequence[str]:
    if isinstance(error, ConfigInvalid):
        return error.faults
    return [error.message]


def _load_again(
    config: Configuration, args: Arguments, changes: Sequence[Change], version: str, servers: Sequence[Management]
) -> None:
    """Load a version that was deployed into servers that lack it. Raises `BatonError` if it cannot be."""
    folder, path = _find_deployed_folder(changes, args.conductor, version)
    card, golden = manifest.read(folder)
    if card.name != version:
        raise ConfigInvalid([f"{folder}: is {card.name} by now, not {version}; deploy it as another version"])
    deployment.check_signature(folder, card, config.settings)
    note = deployment.deploy(servers, folder, card, golden, path)
    event_loop.run(_store(config.settings, args, "loaded", version, note=note))


def _find_deployed_folder(changes: Sequence[Change], conductor: str, version: str) -> tuple[Path, str]:
    """Return the folder from which a version was deployed last, as seen from here and from its server."""
    note = ""
    for change in changes:
        if (change.conductor, change.kind, change.version) == (conductor, "loaded", version):
            note = change.note
    record = json.loads(note or "{}")
    if "folder" not in record:
        raise ConfigInvalid([f"{version}: was deployed by an older Baton, which kept no folder; deploy it once more"])
    return Path(record["folder"]), record["path"]


def _shadow(config: Configuration, args: Arguments, now: Callable[[], float]) -> int:
    comparison = shadow_plans.PlanComparison()
    with conductor_servers(config, args.conductor) as servers:
        event_loop.run(_compare(config.settings, servers[0], args, now(), comparison))
    note = comparison.as_json()
    event_loop.run(_store(config.settings, args, "shadowed", args.version, note=note))
    if args.json:
        print(note, flush=True)
    else:
        terminal.stdout().print(f"{shadow_plans.summary(note)}\n{note}", soft_wrap=True)
    return 0


async def _compare(
    settings: Settings, server: Management, args: Arguments, now: float, comparison: shadow_plans.PlanComparison
) -> None:
    versions = await _in_force(settings, args.conductor)
    if reason := refusal(versions, "shadowed", args.version):
        raise ConfigInvalid([reason])
    async with storage.existing_database(settings), storage.open_journals(settings) as archive:
        since = now - args.since
        async for case in shadow_plans.read_cases(archive, args.conductor, versions.live, since, now, comparison):
            if comparison.plans >= args.limit:
                break
            shadow_plans.compare(server, args.version, case, comparison)


def _change(config: Configuration, args: Arguments) -> int:
    kind, version = KINDS[args.verb], getattr(args, "version", "")
    if args.conductor not in conductor_names(config.catalog):
        raise ConfigInvalid([f"{args.conductor}: conducts no tier of the pool file"])
    request = RequestedChange(args.conductor, kind, version, getattr(args, "share", 0.0))

    def read_served() -> list[str]:
        with conductor_servers(config, request.conductor) as servers:
            return find_common_models(servers)

    async def check(store: Store) -> RequestedChange:
        return await check_change(store, request, read_served, trusted_signers(config.settings), terminal.warn)

    evidence = event_loop.run(version_changes.change(config, args, check))
    if evidence:
        return version_changes.refuse(evidence, as_json=args.json)
    if kind == "unloaded":
        with conductor_servers(config, args.conductor) as servers:
            for server in servers:
                server.unload(version)
    return _list(config.settings, 1, as_json=args.json)


async def _store(settings: Settings, args: Arguments, kind: ChangeKind, version: str, note: str) -> None:
    """Store what was found about a version."""
    async with storage.open_configured_store(settings) as store:
        request = RequestedChange(args.conductor, kind, version)
        await make_change(
            store, request, name=version_changes.new_change_id(), by=version_changes.author(args), note=note
        )


async def _in_force(settings: Settings, conductor: str) -> VersionsInForce:
    async with storage.open_configured_store(settings) as store:
        return versions_in_force(await store.changes()).get(conductor, VersionsInForce())


def _list(settings: Settings, limit: int, *, as_json: bool) -> int:
    changes = event_loop.run(version_changes.read_changes(settings, of_tiers=False))
    version_changes.show(changes, limit, as_json=as_json, words=_words)
    return 0


def _words(name: str, now: VersionsInForce) -> str:
    live = now.live or "the pool file's own model"
    return f"{name}: {live}{version_changes.canary_text(now)}; loaded: {', '.join(now.loaded) or 'none'}"
