"""The hash of a journal is the root of an RFC 6962 tree over its events."""

from hashlib import sha256

import pytest

from app.core.run.journal_hash import leaf, root

EVENTS = [(seq, "call.finished", seq / 7, b'{"n":%d}' % seq) for seq in range(1, 8)]


def leaves(count: int) -> list[bytes]:
    return [
        sha256(b"\0run\n%d\ncall.finished\n%s\n%s" % (seq, repr(at).encode(), body)).digest()
        for seq, _, at, body in EVENTS[:count]
    ]


def node(left: bytes, right: bytes) -> bytes:
    return sha256(b"\1" + left + right).digest()


def test_a_tree_has_the_shape_of_rfc_6962() -> None:
    a, b, c, d, e, f, g = leaves(7)
    assert root("run", EVENTS[:1]) == a
    assert root("run", EVENTS[:3]) == node(node(a, b), c)
    assert root("run", EVENTS) == node(node(node(a, b), node(c, d)), node(node(e, f), g))
    assert root("run", []) == sha256(b"").digest()


@pytest.mark.parametrize(
    "changed",
    [
        ("other", 3, "kind", 1.5, b"{}"),
        ("run", 4, "kind", 1.5, b"{}"),
        ("run", 3, "other", 1.5, b"{}"),
        ("run", 3, "kind", 1.25, b"{}"),
        ("run", 3, "kind", 1.5, b"[]"),
    ],
)
def test_each_part_of_an_event_changes_its_hash(changed: tuple[str, int, str, float, bytes]) -> None:
    assert leaf(*changed) != leaf("run", 3, "kind", 1.5, b"{}")
