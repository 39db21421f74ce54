"""The log's tree, tiles, signed notes and entries, against vectors that others published."""

from hashlib import sha256

import pytest

from app.core.transparency import leaves
from app.core.transparency.merkle import (
    EMPTY_ROOT,
    Frontier,
    consistency_proof,
    consistent,
    includes,
    inclusion_proof,
    leaf_hash,
    node_hash,
    range_root,
    tree_root,
)
from app.core.transparency.notes import (
    Checkpoint,
    NoteInvalid,
    Signer,
    Verifier,
    open_checkpoint,
    open_note,
    sign,
)
from app.core.transparency.tiles import Tile, bundle, node_reader, parse_tile, tiles_of
from tests.harness.log_authorities import is_consistent

# The entries and the roots of the first n of them from the tests of Certificate Transparency.
ENTRIES = [b"", b"\0", b"\x10", b" !", b"01", b"@ABC", b"PQRSTUVW", b"`abcdefghijklmno"]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]

# The keys and the note from the documentation of golang.org/x/mod/sumdb/note.
SIGNER = "PRIVATE+KEY+PeterNeumann+c74f20a3+AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz"
VERIFIER = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
TEXT = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
SIGNATURE = "x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM="
NOTE = f"{TEXT}\n\u2014 PeterNeumann {SIGNATURE}\n"


class Tiles:
    """The tiles of a log, cut from a list of leaf hashes."""

    def __init__(self, hashes: list[bytes]) -> None:
        self.levels = [hashes]
        while len(self.levels[-1]) >= 256:
            below = self.levels[-1]
            self.levels.append([tree_root(below[at : at + 256]) for at in range(0, len(below) - 255, 256)])

    def tile(self, level: int, number: int) -> list[bytes]:
        return self.levels[level][number * 256 : number * 256 + 256]


def hashes(count: int) -> list[bytes]:
    return [leaf_hash(b"%d" % number) for number in range(count)]


def test_roots_are_those_of_certificate_transparency() -> None:
    leaf_hashes = [leaf_hash(entry) for entry in ENTRIES]
    assert [tree_root(leaf_hashes[:size]).hex() for size in range(1, 9)] == ROOTS
    assert tree_root([]) == EMPTY_ROOT


def test_a_tree_goes_on_from_its_frontier() -> None:
    whole = hashes(100)
    frontier = Frontier()
    frontier.extend(whole[:77])
    frontier = Frontier.from_bytes(77, frontier.to_bytes())
    frontier.extend(whole[77:])
    assert frontier.root() == tree_root(whole)


def test_each_entry_is_proven_by_the_tiles_and_no_other_is() -> None:
    whole = hashes(700)
    node = node_reader(Tiles(whole).tile)
    for size in (1, 2, 7, 8, 255, 256, 257, 700):
        root = tree_root(whole[:size])
        assert range_root(0, size, node) == root
        for index in {0, size // 2, size - 1}:
            proof = inclusion_proof(index, size, node)
            assert includes(index, size, whole[index], proof, root)
            assert not includes(index, size, leaf_hash(b"other"), proof, root)
            assert not includes(index, size, whole[index], [*proof, root], root)
            assert not includes(index, size, whole[index], proof, EMPTY_ROOT)
            assert size == 1 or not includes(index, size, whole[index], proof[1:], root)


def test_a_tree_is_proven_to_be_the_beginning_of_another() -> None:
    whole = hashes(70)
    node = node_reader(Tiles(whole).tile)
    roots = [tree_root(whole[:size]) for size in range(71)]
    forged = [*roots]
    forged[33] = tree_root([leaf_hash(b"other"), *whole[1:33]])
    for old in (0, 1, 2, 3, 8, 33, 64, 69, 70):
        for new in (old, 64, 65, 70):
            if new >= old:
                proof = consistency_proof(old, new, node)
                assert consistent(old, new, (roots[old], roots[new]), proof)
                assert not consistent(old, new, (b"x" * 32, roots[new]), proof)
                assert is_consistent(old, roots[old], new, roots[new], proof)
                assert old == new or not is_consistent(old, roots[old], new, roots[new - 1], proof) or old == 0
    assert not is_consistent(33, forged[33], 70, roots[70], consistency_proof(33, 70, node))
    assert not consistent(33, 70, (forged[33], roots[70]), consistency_proof(33, 70, node))


@pytest.mark.parametrize(
    ("tile", "path"),
    [
        (Tile(0, 0), "tile/0/000"),
        (Tile(1, 1_234_067), "tile/1/x001/x234/067"),
        (Tile(0, 1_000, 7), "tile/0/x001/000.p/7"),
        (Tile(None, 5, 255), "tile/entries/005.p/255"),
    ],
)
def test_tiles_have_the_paths_of_the_specification(tile: Tile, path: str) -> None:
    assert tile.path == path
    assert parse_tile(path) == tile


@pytest.mark.parametrize(
    "path",
    [
        "tile/00/000",
        "tile/64/000",
        "tile/0/0",
        "tile/0/x000/001",
        "tile/0/000.p/0",
        "tile/0/000.p/256",
        "tile/0/000.p/01",
        "tile/0/001/000",
        "tile/0/000/",
        "tile/0/" + "x999/" * 7 + "000",
        "tile/entries/" + "x999/" * 5 + "999",
    ],
)
def test_other_paths_are_no_tiles(path: str) -> None:
    assert parse_tile(path) is None


def test_the_tiles_of_a_tree_are_those_of_the_example_in_the_specification() -> None:
    tiles = [tile for tile in tiles_of(70_000) if tile.level is not None]
    assert len([tile for tile in tiles if tile.level == 0 and tile.width == 256]) == 273
    assert [tile for tile in tiles if tile.width != 256] == [Tile(0, 273, 112), Tile(1, 1, 17), Tile(2, 0, 1)]
    assert [tile.path for tile in tiles_of(256)] == ["tile/entries/000", "tile/0/000", "tile/1/000.p/1"]


def test_a_bundle_has_each_entry_behind_its_length() -> None:
    assert bundle([b"", b"a", b"b" * 300]) == b"\0\0\0\x01a\x01\x2c" + b"b" * 300


def test_notes_are_those_of_the_go_checksum_database() -> None:
    signer, verifier = Signer.parse(SIGNER), Verifier.parse(VERIFIER)
    assert (signer.secret(), str(signer.verifier)) == (SIGNER, VERIFIER)
    assert sign(TEXT, [signer]) == NOTE
    assert open_note(NOTE, [verifier]) == (TEXT, [verifier])


def test_a_note_is_refused_unless_a_known_key_has_signed_it() -> None:
    signer, other = Signer.parse(SIGNER), Signer("other.example/log", bytes(32))
    verifier = signer.verifier
    both = sign(TEXT, [other, signer])
    assert open_note(both, [verifier])[1] == [verifier]
    for bad in (sign(TEXT, [other]), NOTE.replace("answer", "Answer"), TEXT, NOTE[:-1], NOTE.replace("x08g", "y08g")):
        with pytest.raises(NoteInvalid):
            open_note(bad, [verifier])
    for key in (VERIFIER[:-4] + "AAAA", VERIFIER.replace("c74f", "c74e"), VERIFIER[1:], "", "a+b"):
        with pytest.raises(NoteInvalid):
            Verifier.parse(key)


def test_a_checkpoint_is_signed_by_the_log_that_it_names() -> None:
    signer = Signer("log.example/baton", sha256(b"seed").digest())
    checkpoint = Checkpoint("log.example/baton", 8, bytes.fromhex(ROOTS[-1]))
    assert checkpoint.text == "log.example/baton\n8\nXcnaeacGWamtVZy3Ad7ZoqudgjqtL0lgz+Nw7/RgQyg=\n"
    assert open_checkpoint(sign(checkpoint.text, [signer]), [signer.verifier]) == checkpoint
    foreign = Checkpoint("other.example/log", 8, checkpoint.root)
    for text in (foreign.text, checkpoint.text.replace("\n8\n", "\n08\n"), "log.example/baton\n8\n"):
        with pytest.raises(NoteInvalid):
            open_checkpoint(sign(text, [signer]), [signer.verifier])


def test_an_entry_names_the_state_of_a_run_by_hashes_alone() -> None:
    row = {"id": "run_1", "tenant": "acme", "salt": b"\0\1", "error": None, "created_at": 1.5}
    salt = b"s" * leaves.SALT_BYTES
    parts = leaves.events_part(7, node_hash(b"a", b"b")) | {leaves.ROW: leaves.commitment(salt, leaves.ROW, row)}
    entry = leaves.leaf(leaves.RUN, "run_1", 1_790_000_000.125, parts)
    leaf = leaves.parse_leaf(entry)
    assert (leaf.kind, leaf.id, leaf.at, leaf.events) == ("run", "run_1", 1_790_000_000.125, 7)
    assert leaf.root == node_hash(b"a", b"b")
    assert leaf.parts == {"row": parts["row"]}
    assert b"acme" not in entry
    assert leaves.canonical(row) == b'{"created_at":1.5,"id":"run_1","salt":"AAE=","tenant":"acme"}'
    # Each of salt, part and values counts; a column that is NULL does not, so that later releases may add some.
    later = {**row, "added": None}
    assert leaves.commitment(salt, leaves.ROW, later) == parts["row"]
    assert leaves.commitment(salt, leaves.END, row) != parts["row"]
    assert leaves.commitment(b"t" * 16, leaves.ROW, row) != parts["row"]
    assert leaves.commitment(salt, leaves.ROW, {**row, "tenant": "other"}) != parts["row"]
