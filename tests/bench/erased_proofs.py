"""`python -m tests.bench.erased_proofs`: erasing the content of 1,000 users changes no proof.

    python -m tests.bench.erased_proofs [--users 1000] [--postgres]

Each user asks for a run, whose texts and tags are the user's. While they are written they are sealed, in many passes
with a checkpoint each. Then the content is erased, user by user, by the query of `baton runs erase --user`, and runs of
nobody are admitted and sealed meanwhile. The exit status is 1 unless

* every run's proof has the entries and salts that it had, which are in the trees of the checkpoint before the erasure
  and of the newest one;
* `baton audit verify` finds nothing in the rows and events of all runs, with every earlier checkpoint held outside;
* no text of a user is stored.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace
from sqlalchemy import func, select

from app.audit.log.findings import Verification
from app.audit.log.tree import read_checkpoint
from app.core.run.kinds import Kind
from app.core.transparency.merkle import includes, leaf_hash
from app.core.transparency.notes import parse_checkpoint, split_note
from app.engine.retention import EraseResult, erase_all, runs_with_content
from app.store.archive import open_archive
from app.store.protocol import REQUEST_TAG, USER_TAG, ContentQuery, Entry, RunRow
from app.store.protocol.transparency_log import Proof, ProvenLeaf
from app.store.sql import SqlStore, open_store
from app.store.sqlkit.tables import CONTENTS
from tests.audit.tampers import seal, verify
from tests.bench.verification import database
from tests.conformance.test_store_retention import admission, end_run
from tests.harness.raw_facts import Raw

USERS_A_PASS = 50
"""Users whose runs are written between two checkpoints."""
ERASED_AT_ONCE = 8


def user(number: int) -> str:
    return f"user-{number:05d}"


def make_run(run: str, name: str | None) -> tuple[Entry, Entry]:
    """The two entries of a run that this user has asked for."""
    first = admission(run, name, text=f"secret of {name}")
    body = {"tier": "mini", "request_id": "req", "task": first.contents[0][0]}
    tags = ((REQUEST_TAG, "req"), *(((USER_TAG, name),) if name is not None else ()))
    admitted = replace(first, events=(Raw(Kind.ADMITTED, body),), tags=tags)
    return admitted, replace(end_run(run, 2.0), tags=(("worker", "alpha"),))


async def fill(store: SqlStore, users: int) -> list[str]:
    """Write a run for each user. Returns the signed checkpoints."""
    notes = []
    for first in range(0, users, USERS_A_PASS):
        for number in range(first, min(first + USERS_A_PASS, users)):
            for entry in make_run(f"run_{number:05d}", user(number)):
                await store.append(entry)
        notes.append(await seal(store))
    return notes


async def erase(store: SqlStore, users: int) -> int:
    """Erase user by user, while others ask. Returns the number of runs."""
    erased = 0
    for first in range(0, users, ERASED_AT_ONCE):
        names = [user(number) for number in range(first, min(first + ERASED_AT_ONCE, users))]
        outcomes = await asyncio.gather(*[_erase_user(store, name) for name in names])
        erased += sum([erasure.runs for erasure in outcomes])
        for entry in make_run(f"later_{first:05d}", None):
            await store.append(entry)
        await seal(store)
    return erased


async def _erase_user(store: SqlStore, name: str) -> EraseResult:
    return await erase_all(store, lambda: runs_with_content(store, ContentQuery(user=name)), _ignore_open_runs)


async def _ignore_open_runs(_rows: Sequence[RunRow]) -> None:
    """All runs have ended."""


def wrong(before: Mapping[str, Proof], after: Mapping[str, Proof]) -> list[str]:
    """Return the runs whose proof has changed, or fits its checkpoint no more."""
    return [run for run, proof in after.items() if not _is_same(before[run], proof)]


def _is_same(before: Proof, after: Proof) -> bool:
    same = [_fixed_part(leaf) for leaf in before.leaves] == [_fixed_part(leaf) for leaf in after.leaves]
    return bool(after.leaves) and same and _fits(before) and _fits(after)


def _fixed_part(leaf: ProvenLeaf) -> tuple[int, bytes, bytes | None]:
    """Return what stays of a proof while the log grows."""
    return leaf.place, leaf.entry, leaf.salt


def _fits(proof: Proof) -> bool:
    """Return True if all entries of a proof are in the tree of its checkpoint."""
    assert proof.checkpoint is not None
    head = parse_checkpoint(split_note(proof.checkpoint)[0])
    return all(includes(leaf.place, head.size, leaf_hash(leaf.entry), leaf.proof, head.root) for leaf in proof.leaves)


async def audit_database(url: str, notes: Sequence[str]) -> Verification:
    """Verify the database against these checkpoints, as `baton audit verify --settled` does."""
    checkpoints = [(f"checkpoint {number}", read_checkpoint(note)) for number, note in enumerate(notes)]
    async with open_archive(url) as archive:
        return await archive.snapshot(lambda conn, opened: verify(conn, checkpoints, opened))


async def carry_out(url: str, users: int) -> bool:
    """Carry out everything, and print the figures. True if no proof has changed."""
    runs = [f"run_{number:05d}" for number in range(users)]
    async with open_store(url) as store:
        notes = await fill(store, users)
        before = {run: await store.log.proof(run) for run in runs}
        began = time.monotonic()
        erased = await erase(store, users)
        seconds = time.monotonic() - began
        after = {run: await store.log.proof(run) for run in runs}
        left = await store._read(
            lambda conn: conn.execute(
                select(func.count()).select_from(CONTENTS).where(CONTENTS.c.run.like("run_%"))
            ).scalar_one()
        )
    changed, report = wrong(before, after), await audit_database(url, notes)
    print(f"{erased:,} runs of {users:,} users erased in {seconds:.0f} s; {left} of their texts are stored")
    print(
        f"{len(after) - len(changed):,} of {len(after):,} proofs are as they were, in the tree of the newest checkpoint"
    )
    print(f"{len(notes)} earlier checkpoints; findings of the audit: {report.rules.total()} {report.first or ''}")
    return erased == users and not left and not changed and report.is_clean and report.erased == users


def main() -> int:
    parser = argparse.ArgumentParser(description="Erasing the content of many users changes no proof.")
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--postgres", action="store_true", help="on Postgres instead of SQLite")
    options = parser.parse_args()
    with database(postgres=options.postgres) as url:
        return 0 if asyncio.run(carry_out(url, options.users)) else 1


if __name__ == "__main__":
    sys.exit(main())
