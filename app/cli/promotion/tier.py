"""`baton tier VERB` puts another tier, or a worker that answers alone, in the place of a tier, and ends that again.

canary, promote, rollback  choose what serves a tier; gateways follow within two seconds
ls ....................... print what serves each tier, and every change with its time and author
"""

from collections.abc import Callable, Mapping

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.promotion import version_changes
from app.core.pool.catalog import Catalog
from app.core.pool.conductor_versions import ChangeKind, VersionsInForce
from app.core.pool.serving import TIER, objection, subject_named, tier_in
from app.engine.conductors.versions import RequestedChange, check_service
from app.errors import ConfigInvalid
from app.process.config import Configuration, configure
from app.store.protocol import Store

KINDS: Mapping[str, ChangeKind] = {"canary": "canary", "promote": "promoted", "rollback": "rolled_back"}


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs. Returns the exit status."""
    terminal.log_to_stderr("warning")
    config = configure(environ)
    storage.print_database(config.settings)
    if args.verb == "ls":
        return _list(config, args.limit, as_json=args.json)
    return _change(config, args)


def _change(config: Configuration, args: Arguments) -> int:
    catalog = config.catalog
    tier = catalog.tier(args.tier)
    if tier is None:
        raise ConfigInvalid([f"{args.tier}: there is no such tier; use one of {', '.join(catalog.tiers)}"])
    kind = KINDS[args.verb]
    subject = ""
    if kind != "rolled_back":
        subject = subject_named(catalog, args.to)
    request = RequestedChange(f"{TIER}{tier.name}", kind, subject, getattr(args, "share", 0.0))

    async def check(store: Store) -> RequestedChange:
        return await check_service(store, catalog, request)

    evidence = event_loop.run(version_changes.change(config, args, check))
    if evidence:
        return version_changes.refuse(evidence, as_json=args.json)
    return _list(config, 1, as_json=args.json)


def _list(config: Configuration, limit: int, *, as_json: bool) -> int:
    def words(name: str, now: VersionsInForce) -> str:
        return _words(config.catalog, tier_in(name), now)

    changes = event_loop.run(version_changes.read_changes(config.settings, of_tiers=True))
    names = [f"{TIER}{name}" for name in config.catalog.tiers]
    version_changes.show(changes, limit, as_json=as_json, words=words, names=names)
    return 0


def _words(catalog: Catalog, tier: str, now: VersionsInForce) -> str:
    """Return in words what serves a tier; a subject that the pool file does not have serves nothing."""
    if tier not in catalog.tiers:
        return f"{tier}: is not in the pool file any more"
    reasons = ""
    for subject in (now.live, now.canary):
        reason = None
        if subject:
            reason = objection(catalog, tier, subject)
        if reason:
            reasons += f"; its own definition serves instead, because {reason}"
    return f"{tier}: {now.live or 'its own definition'}{version_changes.canary_text(now)}{reasons}"
