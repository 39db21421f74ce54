"""The content keys of one process: made when a tenant first stores content, loaded when a content needs them."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Protocol, TypeVar

from sqlalchemy import Connection, select

from app.errors import NotFound
from app.store.protocol import Entry
from app.store.rows import content_keys
from app.store.sqlkit.sealing import ContentKey, Keyring, MasterKey
from app.store.sqlkit.tables import RUNS

T = TypeVar("T")
PRESENT_SECONDS = 5.0
"""Time for which a tenant's key is used without a look whether it was taken out of use."""
FOLLOW_SECONDS = 15.0
"""Time after which no process writes under a key that was taken out of use: the time above, and what an entry waits."""
MOST_RUNS = 8192
"""Most runs whose tenant is remembered."""


class CarryOut(Protocol):
    """A way to carry out work on the store's connection, with its retries."""

    def __call__(self, work: Callable[[Connection], T], /) -> Awaitable[T]:
        """Carry out the work."""
        ...


class TenantKeys:
    """Finds the key for an entry's contents, and loads the keys of contents that are read."""

    def __init__(self, masters: Sequence[MasterKey], read: CarryOut, write: CarryOut) -> None:
        """`read` and `write` carry out work on the store."""
        self.keyring = Keyring(masters)
        self.encrypts = bool(self.keyring.present)
        """True if there is a master key, so that contents are encrypted."""
        self._read = read
        self._write = write
        self._present: dict[str, tuple[float, ContentKey]] = {}
        """For each tenant the key in use, and the monotonic time until which it is used unseen."""
        self._tenants: OrderedDict[str, str] = OrderedDict()

    async def key_for(self, entry: Entry) -> ContentKey | None:
        """Return the key under which the contents of an entry are encrypted; None if its run does not exist."""
        try:
            tenant = entry.new.tenant if entry.new is not None else await self._tenant_of(entry.run)
        except NotFound:
            return None  # the commit refuses the entry
        self._remember(entry.run, tenant)
        until, key = self._present.get(tenant, (0.0, None))
        if key is None or until <= time.monotonic():
            key = await self._in_use(tenant, entry.at)
        return key

    def look_again(self) -> None:
        """Have the database say which keys are in use: it may be a copy that lacks the latest ones."""
        self._present.clear()

    async def load(self, ids: Collection[str]) -> None:
        """Load content keys that a content needs. Raises `StoreUnavailable` for one whose master key is missing."""
        rows = await self._read(partial(content_keys.of_ids, ids=ids))
        await asyncio.to_thread(self.keyring.load, rows, ids)

    async def load_all(self) -> int:
        """Load every content key; their number. Raises `ContentKeyUnavailable` for one whose master key is missing."""
        rows = await self._read(content_keys.read_all)
        await asyncio.to_thread(self.keyring.load, rows)
        return len(rows)

    async def rewrap(self) -> tuple[int, int]:
        """Encrypt all content keys under the present master key; their number, and that of those which were not."""
        rows = await self._read(content_keys.read_all)
        outdated_rows = [row for row in rows if row.master != self.keyring.present]
        for row in outdated_rows:
            rewrapped_key = await asyncio.to_thread(self.keyring.rewrap, row)
            await self._write(partial(content_keys.replace_wrapping, key=rewrapped_key, was=row.master))
        return len(rows), len(outdated_rows)

    async def retire(self, tenant: str, at: float) -> float:
        """Take a tenant's keys out of use; the seconds until every process has followed, 0 if it has no keys.

        They are waited for also where an erasure that was interrupted had taken the keys out of use already.
        """
        await self._write(partial(content_keys.retire, tenant=tenant, at=at))
        self._present.pop(tenant, None)
        keys = await self._read(content_keys.read_all)
        if not any(key.tenant == tenant for key in keys):
            return 0.0
        return FOLLOW_SECONDS

    async def destroy(self, tenant: str) -> int:
        """Destroy a tenant's keys that are out of use; their number."""
        ids = await self._write(partial(content_keys.destroy, tenant=tenant))
        self.keyring.forget(ids)
        return len(ids)

    async def _in_use(self, tenant: str, at: float) -> ContentKey:
        """Return the tenant's key in use, which is made if there is none."""
        row = await self._read(partial(content_keys.find_current, tenant=tenant))
        if row is None:
            new_key = await asyncio.to_thread(self.keyring.make, tenant, at)
            row = await self._write(partial(content_keys.add, key=new_key))
        await asyncio.to_thread(self.keyring.load, [row])
        key = self.keyring.key(row.id)
        assert key is not None
        self._present[tenant] = time.monotonic() + PRESENT_SECONDS, key
        return key

    async def _tenant_of(self, run: str) -> str:
        cached_tenant = self._tenants.get(run)
        if cached_tenant is not None:
            return cached_tenant
        query = select(RUNS.c.tenant).where(RUNS.c.id == run)
        tenant: str | None = await self._read(lambda conn: conn.execute(query).scalar_one_or_none())
        if tenant is None:
            raise NotFound
        return tenant

    def _remember(self, run: str, tenant: str) -> None:
        self._tenants[run] = tenant
        while len(self._tenants) > MOST_RUNS:
            self._tenants.popitem(last=False)
