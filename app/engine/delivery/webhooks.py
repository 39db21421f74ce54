"""Deliveries of notices to the operator's webhook, by every process that drives runs.

A notice is in the database from the moment its turn has ended (`writing/batch.py`) until it was delivered. The process
that claims it tries it once. If that process dies, its claim expires and another process tries again under the same
`webhook-id`. So a notice may be delivered twice, and is given up only after the receiver was unreachable for about
three days.

The address is the operator's and nothing of it comes from a caller. One delivery is one request: no redirects, no
proxies and no credentials from the environment, and only the status and the headers of the reply are read.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import httpx
from msgspec import Struct

from app.core.run import notices
from app.core.run.notices import Notice
from app.engine.context import EngineContext
from app.engine.periodic import wait_for_event
from app.errors import StoreUnavailable
from app.network import retries
from app.network.http_client import async_client
from app.network.retries import retry

SLOTS = 16
"""Deliveries on the wire at a time, in one process."""
DELIVERY_SECONDS = 15.0
"""Longest time for a delivery, from the name look-up to the reply's headers."""
CLAIM_SECONDS = 2 * DELIVERY_SECONDS
"""Time for which one process owns a notice; what the delivery leaves of them is for the database."""
POLL_SECONDS = 1.0
"""Time between two queries for notices, on average."""
GRACE_SECONDS = 2.0
"""Time that deliveries on the wire get when the process stops."""
COUNT_SECONDS = 15.0
"""Time between two counts of pending notices."""
MOST_COUNTED = 10_000
"""The count stops at so many."""
FORGET_SECONDS = 60.0
"""Time between two queries for old notices to delete, where no webhook is configured."""
MOST_FORGOTTEN = 500
"""Old notices that one query deletes, at the most."""
GONE = 410
HEADERS = {"content-type": "application/json", "user-agent": "baton"}


@dataclass(frozen=True, slots=True)  # no struct, which would show the secrets in a traceback
class Target:
    """The address of the webhook and the secrets that each notice is signed with."""

    url: str = field(repr=False)
    secrets: tuple[bytes, ...] = field(repr=False)


class DeliveryResult(Struct, frozen=True):
    """The result of one try: the reply's status or 0, the reason why there is none, and the seconds for which the
    receiver asks to wait."""

    status: int = 0
    reason: str = ""
    wait: float = 0.0

    @property
    def delivered(self) -> bool:
        """Return True if the receiver has accepted the notice."""
        return 200 <= self.status < 300


class Webhooks:
    """The deliveries of one process."""

    def __init__(
        self, context: EngineContext, target: Target | None, *, client: Callable[[], httpx.AsyncClient] | None = None
    ) -> None:
        """Without a target, old notices from times when there was one are deleted. `client` makes the HTTP client."""
        self._context = context
        self._target = target
        self._client = client or _client
        self._deliveries: set[asyncio.Task[None]] = set()
        self._counted_at = float("-inf")

    def sign_for(self, target: Target | None) -> None:
        """Send further deliveries there, signed with its secrets. Whether there are any is decided at the start."""
        if self._target is not None and target is not None:
            self._target = target

    async def run(self, stopping: asyncio.Event) -> None:
        """Deliver until `stopping` is set; the rest is left to other processes, or to the next start."""
        if self._target is None:
            return await self._forget_until(stopping)
        async with self._client() as client, asyncio.TaskGroup() as group:
            while not stopping.is_set():
                for notice in await self._take():
                    task = group.create_task(self._deliver(client, self._target, notice))
                    self._deliveries.add(task)
                    task.add_done_callback(self._deliveries.discard)
                await self._pause(stopping)
            if self._deliveries:
                await asyncio.wait(self._deliveries, timeout=GRACE_SECONDS)
            for task in self._deliveries:
                task.cancel()

    async def _take(self) -> tuple[Notice, ...]:
        room, now = SLOTS - len(self._deliveries), self._context.now()
        try:
            await self._count()
            if room <= 0 or not self._context.clock_is_set():
                return ()
            return await self._context.store.take_notices(now, now + CLAIM_SECONDS, room)
        except StoreUnavailable:  # the drivers of this process log it already
            return ()

    async def _count(self) -> None:
        if self._context.monotonic() - self._counted_at >= COUNT_SECONDS:
            self._counted_at = self._context.monotonic()
            pending = await self._context.store.count_pending_notices(MOST_COUNTED)
            self._context.telemetry.gauge("baton_webhooks_pending", pending)

    async def _pause(self, stopping: asyncio.Event) -> None:
        """Wait for the next poll; if all slots are in use, only until one of them is free."""
        pause = POLL_SECONDS * (0.5 + self._context.random())
        if len(self._deliveries) >= SLOTS:
            await asyncio.wait(self._deliveries, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        else:
            await wait_for_event(stopping, pause)

    async def _deliver(self, client: httpx.AsyncClient, target: Target, notice: Notice) -> None:
        """Try one notice once. No error leaves this method, so that none ends the other deliveries.

        The result is written as often as it takes while the claim lasts: a lost result means a second delivery.
        """
        until = self._context.monotonic() + CLAIM_SECONDS
        policy = partial(retries.database, left=lambda: until - self._context.monotonic())
        try:
            result = await self._post(client, target, notice)
            await retry(partial(self._settle, notice, result), policy)
        except StoreUnavailable:
            self._log(
                logging.WARNING,
                "The result of a webhook could not be stored because the database is away; the webhook is tried again.",
                notice,
            )
        except Exception as error:
            self._context.telemetry.log(
                logging.ERROR,
                "The delivery of a webhook failed because of a bug; it is tried again.",
                error,
                run=notice.run,
            )

    async def _post(self, client: httpx.AsyncClient, target: Target, notice: Notice) -> DeliveryResult:
        body = notices.payload(notice)
        signed = notices.headers(target.secrets, notice.id, body, int(self._context.now()))
        try:
            async with (
                asyncio.timeout(DELIVERY_SECONDS),
                client.stream("POST", target.url, content=body, headers=signed) as reply,
            ):
                return DeliveryResult(reply.status_code, wait=_retry_after(reply.headers))
        except (TimeoutError, httpx.TimeoutException):
            return DeliveryResult(reason="timeout")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return DeliveryResult(reason=str(error) or type(error).__name__)

    async def _settle(self, notice: Notice, result: DeliveryResult) -> None:
        """Close the notice, or store when it is tried again. A failed delivery is retried by this schedule in the
        database, which outlives the process, and not by a retry policy of the process."""
        store, now = self._context.store, self._context.now()
        if result.delivered:
            await store.close_notice(notice)
            return self._context.telemetry.count("baton_webhooks_total", "delivered")
        again = notices.next_try(notice, now, self._context.random(), result.wait)
        if result.status == GONE or again is None:
            reason = result.reason or f"HTTP {result.status}"
            if await store.fail_notice(notice, now, reason):
                self._context.telemetry.count("baton_webhooks_total", "failed")
                self._log(
                    logging.ERROR,
                    "A webhook was given up: the receiver did not accept it in time, or has gone.",
                    notice,
                    result,
                )
        elif await store.put_off_notice(notice, again):
            self._context.telemetry.count("baton_webhooks_total", "retried")
            self._log(logging.INFO, "A webhook was not accepted; it is tried again later.", notice, result)

    def _log(self, level: int, message: str, notice: Notice, result: DeliveryResult = DeliveryResult()) -> None:
        fields = {"run": notice.run, "count": notice.tries, "status": result.status, "reason": result.reason}
        self._context.telemetry.log(level, message, **{name: value for name, value in fields.items() if value})

    async def _forget_until(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            with suppress(StoreUnavailable):
                ended_before = self._context.now() - notices.KEPT_UNSENT_SECONDS
                await self._context.store.forget_notices(ended_before, MOST_FORGOTTEN)
            await wait_for_event(stopping, FORGET_SECONDS * (0.5 + self._context.random()))


def _client() -> httpx.AsyncClient:
    return async_client(headers=HEADERS, connections=SLOTS)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of Retry-After, or 0. A date is not read: the schedule's own pauses grow anyway."""
    text = headers.get("retry-after", "")
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    return 0.0
