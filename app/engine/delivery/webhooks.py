"""Deliveries of notices to the operator's webhook, by every process that drives runs.

A notice stands in the database from the moment its turn has ended (`writing/commit.py`) until it was delivered. Whoever
takes it tries it once; a process that dies over it lets its claim lapse, and another one tries again under the same
`webhook-id`. So a delivery may come twice and is never lost for less than three days' silence of the receiver.

The address is the operator's and nothing of it comes from a caller. One request is one connection attempt: no
redirects, no proxies and no credentials from the environment, nothing read of the reply but its status and headers.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

from app.core.run import notices
from app.core.run.notices import Notice
from app.engine.context import Means
from app.errors import StoreUnavailable

SLOTS = 16
"""Deliveries on the wire at once, in one process."""
DEADLINE = 15.0
"""Seconds for a delivery, from the name look-up to the reply's headers."""
CLAIM = 2 * DEADLINE
"""Seconds for which a notice is one process's: what is left of them is for the database."""
POLL = 1.0
"""Seconds between two looks for notices, on the average."""
GRACE = 2.0
"""Seconds that deliveries on the wire get when the process stops."""
COUNTING = 15.0
"""Seconds between two counts of what is pending."""
COUNTED = 10_000
"""How far that is counted."""
FORGETTING = 60.0
"""Seconds between two looks for notices that nobody is told of any more, where there is no webhook."""
FORGET = 500
GONE = 410


@dataclass(frozen=True, slots=True)
class Target:
    """Where notices go, and the secrets that each is signed with."""

    url: str = field(repr=False)
    secrets: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of one try: the reply's status or 0, why there is none, and for how long the receiver asks to wait."""

    status: int = 0
    reason: str = ""
    wait: float = 0.0

    @property
    def delivered(self) -> bool:
        """Whether the receiver has it."""
        return 200 <= self.status < 300


class Webhooks:
    """The deliveries of one process."""

    def __init__(
        self, means: Means, target: Target | None, *, session: Callable[[], ClientSession] | None = None
    ) -> None:
        """Without a target, notices from times when there was one are forgotten once they are old. `session` makes
        what posts them."""
        self._means = means
        self._target = target
        self._session = session or _session
        self._going: set[asyncio.Task[None]] = set()
        self._counted = float("-inf")

    async def run(self, stopping: asyncio.Event) -> None:
        """Deliver until `stopping` is set; what is not delivered by then is left to others, or to the next start."""
        if self._target is None:
            return await self._forget_until(stopping)
        async with self._session() as session, asyncio.TaskGroup() as group:
            while not stopping.is_set():
                for notice in await self._take():
                    task = group.create_task(self._deliver(session, self._target, notice))
                    self._going.add(task)
                    task.add_done_callback(self._going.discard)
                await self._pause(stopping)
            if self._going:
                await asyncio.wait(self._going, timeout=GRACE)
            for task in self._going:
                task.cancel()

    async def _take(self) -> tuple[Notice, ...]:
        room, now = SLOTS - len(self._going) if self._means.timed() else 0, self._means.now()
        try:
            await self._count()
            return await self._means.store.take_notices(now, now + CLAIM, room) if room else ()
        except StoreUnavailable:  # the drivers of this process say so already
            return ()

    async def _count(self) -> None:
        if self._means.tick() - self._counted >= COUNTING:
            self._counted = self._means.tick()
            pending = await self._means.store.pending_notices(COUNTED)
            self._means.telemetry.gauge("baton_webhooks_pending", pending)

    async def _pause(self, stopping: asyncio.Event) -> None:
        """Until there may be something to do: not before a delivery is over if all of them are on the wire."""
        pause = POLL * (0.5 + self._means.chance())
        if len(self._going) >= SLOTS:
            await asyncio.wait(self._going, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        else:
            await _until(stopping, pause)

    async def _deliver(self, session: ClientSession, target: Target, notice: Notice) -> None:
        """One try of one notice, whatever happens: nothing that goes wrong here may end the others."""
        try:
            heard = await self._post(session, target, notice)
            await self._settle(notice, heard)
        except StoreUnavailable:
            self._say(logging.WARNING, "what came of a webhook could not be kept; it is tried again", notice)
        except Exception as error:
            self._say(logging.ERROR, "a webhook broke; it is tried again", notice)
            logging.getLogger("baton").error("webhook", exc_info=error)

    async def _post(self, session: ClientSession, target: Target, notice: Notice) -> Heard:
        body = notices.payload(notice)
        signed = notices.headers(target.secrets, notice.id, body, int(self._means.now()))
        try:
            async with session.post(target.url, data=body, headers=signed, allow_redirects=False) as reply:
                return Heard(reply.status, wait=_asked(reply.headers))
        except TimeoutError:
            return Heard(reason="timeout")
        except (ClientError, OSError, ValueError) as error:
            return Heard(reason=type(error).__name__)

    async def _settle(self, notice: Notice, heard: Heard) -> None:
        store, now = self._means.store, self._means.now()
        if heard.delivered:
            await store.close_notice(notice)
            return self._means.telemetry.count("baton_webhooks_total", "delivered")
        again = notices.next_try(notice, now, self._means.chance(), heard.wait)
        if heard.status == GONE or again is None:
            if await store.close_notice(notice):
                self._means.telemetry.count("baton_webhooks_total", "failed")
                self._say(logging.ERROR, "a webhook was given up", notice, heard)
        elif await store.put_off_notice(notice, again):
            self._means.telemetry.count("baton_webhooks_total", "retried")
            self._say(logging.INFO, "a webhook is tried again later", notice, heard)

    def _say(self, level: int, message: str, notice: Notice, heard: Heard = Heard()) -> None:
        what = {"run": notice.run, "count": notice.tries, "status": heard.status or None, "reason": heard.reason}
        self._means.telemetry.log(level, message, **{name: value for name, value in what.items() if value})

    async def _forget_until(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            with suppress(StoreUnavailable):
                await self._means.store.forget_notices(self._means.now() - notices.KEEP, FORGET)
            await _until(stopping, FORGETTING * (0.5 + self._means.chance()))


def _session() -> ClientSession:
    return ClientSession(
        connector=TCPConnector(limit=SLOTS),
        timeout=ClientTimeout(total=DEADLINE),
        cookie_jar=DummyCookieJar(),
        headers={"content-type": "application/json", "user-agent": "baton"},
        auto_decompress=False,
        trust_env=False,
    )


def _asked(headers: Mapping[str, str]) -> float:
    """Seconds of Retry-After; 0 if there are none. A date is not worth the code: our own pauses grow anyway."""
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0


async def _until(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
