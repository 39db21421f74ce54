"""`baton audit log` shows the transparency log, and `baton runs proof` checks the proofs of its entries about a run."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.audit import exported_checkpoints
from app.core.transparency.leaves import RUN, Leaf, parse_leaf
from app.core.transparency.merkle import includes, leaf_hash
from app.core.transparency.notes import Checkpoint, NoteInvalid, Signer, Verifier, open_checkpoint
from app.core.transparency.tiles import TileMissing
from app.errors import ConfigInvalid, NotFound, RunPruned
from app.gateway.runs.log_route import proof_of_run
from app.process.config import Settings
from app.store.protocol import LogState, Proof, ProvenLeaf, Store

SEED_BYTES = 32
ProvenEntry = tuple[ProvenLeaf, Leaf]
"""An entry as it is stored, and as it was read."""


def run(args: Arguments, environ: Mapping[str, str], _now: Callable[[], float]) -> int:
    """Carry out one of the verbs. Returns the exit status."""
    if getattr(args, "new_key", None):
        return _new_key(args.new_key, as_json=args.json)
    settings = storage.read_settings(environ)
    try:
        if args.verb == "proof":
            return event_loop.run(_prove(settings, args))
        return event_loop.run(_show(settings, args))
    except NoteInvalid as error:
        words = f"The checkpoint that is stored in the database is not valid: {error}"
        raise ConfigInvalid([f"{words} `baton audit verify` says what else is altered."]) from None
    except TileMissing:
        words = "Hashes of the log are missing in the database, so that no proof can be made."
        raise ConfigInvalid([f"{words} `baton audit verify` says which."]) from None


def _new_key(name: str, *, as_json: bool) -> int:
    """Print a new key. It is a secret, so that standard output has nothing else."""
    try:
        signer = Signer(name, secrets.token_bytes(SEED_BYTES))
    except NoteInvalid:
        raise ConfigInvalid(["--new-key: the name of a log has neither spaces nor a plus"]) from None
    if as_json:
        terminal.print_json({"signer": signer.secret(), "verifier": str(signer.verifier)})
        return 0
    print(signer.secret())
    terminal.stderr().print(f"verifier key, for everybody: {signer.verifier}", soft_wrap=True)
    return 0


async def _show(settings: Settings, args: Arguments) -> int:
    async with storage.open_configured_store(settings) as store:
        state = await store.log.state()
    facts = _facts(state, _checkpoint(state.checkpoint, state.verifiers))
    outside = await exported_checkpoints.read_exported(settings, state.size)
    if outside is None:
        facts["export"] = None
    else:
        facts |= outside.facts(stamps=bool(settings.log_timestamp_url))
    if args.json:
        terminal.print_json(facts)
        return 0
    for name, value in facts.items():
        if isinstance(value, list):
            value = "\n".join(value)
        terminal.stdout().print(f"{name}: {terminal.plain(value)}", soft_wrap=True)
    return 0


def _facts(state: LogState, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Return the state of the log by the names that are printed."""
    origin, root, sealed_at = None, None, None
    if checkpoint is not None:
        origin, root = checkpoint.origin, checkpoint.root.hex()
    if state.sealed_at is not None:
        sealed_at = terminal.moment(state.sealed_at)
    key = None
    if state.stored_key:
        key = "in the database"
    elif state.verifiers:
        key = "BATON_LOG_KEY"
    return {
        "origin": origin,
        "size": state.size,
        "root": root,
        "sealed_at": sealed_at,
        "waiting": state.waiting,
        "lag_seconds": round(state.lag, 3),
        "catching_up": state.catching_up,
        "key": key,
        "verifiers": list(state.verifiers),
    }


def _checkpoint(note: str | None, verifiers: Sequence[str]) -> Checkpoint | None:
    """Return the checkpoint of the log, whose signature is checked by its own keys."""
    if note is None:
        return None
    return open_checkpoint(note, [Verifier.parse(key) for key in verifiers])


async def _prove(settings: Settings, args: Arguments) -> int:
    async with storage.open_configured_store(settings) as store:
        name, events = await _find_run(store, args.run)
        proof, state = await store.log.proof(name), await store.log.state()
    if events is None and not proof.leaves:
        raise NotFound("The log has nothing about this run.")
    proven, faults = _check(proof, state.verifiers)
    sealed_events = max([leaf.events for _, leaf in proven], default=0)
    if args.json:
        document = proof_of_run(name, events or sealed_events, proof)
        terminal.print_json(document | {"sealed": sealed_events, "faults": faults})
    else:
        _print_proven(proven)
        if events is None:
            print("The run was pruned.")
        elif not proof.leaves:
            print("Nothing is proven: no event of the run is sealed yet.")
        else:
            print(f"{sealed_events} of {events} events are sealed.")
        for fault in faults:
            print(fault)
    return int(bool(faults) or not proof.leaves)


def _print_proven(proven: Sequence[ProvenEntry]) -> None:
    for stored, leaf in proven:
        about = leaf.kind
        if leaf.kind == RUN:
            about = terminal.count(leaf.events, "event")
        sealed = f"sealed at {terminal.moment(leaf.at)}, proof of {terminal.count(len(stored.proof), 'hash', 'hashes')}"
        print(f"entry {stored.place}: {about}, {sealed}")


async def _find_run(store: Store, name: str) -> tuple[str, int | None]:
    """Return the id of a run and the number of its events; None for one that was pruned."""
    try:
        row = await storage.find_run(store, name)
    except RunPruned:
        return storage.run_id(name), None
    return row.id, row.seq


def _check(proof: Proof, verifiers: Sequence[str]) -> tuple[list[ProvenEntry], list[str]]:
    """Return the entries that are proven by the signed checkpoint, and what is wrong with it or with the others."""
    try:
        head = _checkpoint(proof.checkpoint, verifiers)
    except NoteInvalid as error:
        return [], [f"The checkpoint is not valid: {error}"]
    if head is None:
        return [], []
    proven: list[ProvenEntry] = []
    faults: list[str] = []
    for stored in proof.leaves:
        try:
            leaf = parse_leaf(stored.entry)
        except ValueError:
            faults.append(f"Entry {stored.place} is malformed: no release of Baton writes such an entry.")
            continue
        if includes(stored.place, head.size, leaf_hash(stored.entry), stored.proof, head.root):
            proven.append((stored, leaf))
        else:
            faults.append(f"Entry {stored.place} is not in the tree of the checkpoint.")
    return proven, faults
