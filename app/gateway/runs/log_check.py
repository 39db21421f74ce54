"""The check of the newest checkpoint of the transparency log by what the service has of it.

The signature is checked with the keys by which the service signs now, the root is computed from the stored hashes, and
where an earlier checkpoint is given, a proof must show that its log is the beginning of this one. Who does not trust
the service checks copies with keys of their own: `baton audit verify`.
"""

from typing import Any

from app.core.transparency.merkle import Node, consistency_proof, consistent, range_root
from app.core.transparency.notes import NoteInvalid, Verifier, open_note, parse_checkpoint
from app.core.transparency.tiles import TileMissing, reader_for
from app.errors import NotFound
from app.store.protocol import TransparencyLog

Earlier = tuple[int, bytes]
"""The size and the root of an earlier checkpoint."""


async def check(log: TransparencyLog, earlier: Earlier | None) -> dict[str, Any]:
    """Return the findings as JSON has them. Raises `NotFound` where there is no checkpoint, and `StoreUnavailable`."""
    state = await log.state()
    if state.checkpoint is None:
        raise NotFound("The log has no checkpoint yet.")
    report: dict[str, Any] = {"object": "log.check", "size": state.size, "root": None, "signed_by": []}
    faults: list[str] = []
    try:
        text, signed = open_note(state.checkpoint, [Verifier.parse(key) for key in state.verifiers])
        newest = parse_checkpoint(text)
    except NoteInvalid as error:
        return report | {"consistent": None, "valid": False, "faults": [str(error)]}
    report |= {"size": newest.size, "root": newest.root.hex(), "signed_by": [key.name for key in signed]}
    node = await _nodes(log, newest.size, earlier)
    try:
        if range_root(0, newest.size, node) != newest.root:
            faults.append("The root of the checkpoint is not that of the stored hashes.")
        is_consistent = None
        if earlier is not None:
            is_consistent = _is_prefix(earlier, (newest.size, newest.root), node)
    except TileMissing:
        return report | {"consistent": None, "valid": False, "faults": [*faults, "Stored hashes are missing."]}
    if is_consistent is False:
        faults.append("The earlier log is not the beginning of this one.")
    return report | {"consistent": is_consistent, "valid": not faults, "faults": faults}


def _is_prefix(earlier: Earlier, newest: Earlier, node: Node) -> bool:
    """Return True if the earlier log is the beginning of the newest."""
    if earlier[0] > newest[0]:
        return False
    proof = consistency_proof(earlier[0], newest[0], node)
    return consistent(earlier[0], newest[0], (earlier[1], newest[1]), proof)


async def _nodes(log: TransparencyLog, size: int, earlier: Earlier | None) -> Node:
    """Return the reader of the nodes that the check needs."""

    def read(node: Node) -> None:
        range_root(0, size, node)
        if earlier is not None and earlier[0] <= size:
            consistency_proof(earlier[0], size, node)

    return await reader_for(read, log.tile)
