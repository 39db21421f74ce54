"""Many callers at once, who keep asking while something is broken, and remember what became of each request."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.faults.scene import CallResult
from tests.harness.processes import KEY, Process, user_message

START_GAP = 0.005
"""Seconds between the first questions of two callers."""
RETRY_PAUSE = 0.2
"""Seconds before a caller asks again."""


@dataclass(slots=True)
class Flood:
    """`callers` ask one question after another, each of another gateway in turn, until told to stop."""

    gateways: Sequence[Process]
    callers: int
    model: str = "baton-ultra"
    pause: float = 0.0
    """Seconds between an answer and the next question of the same caller."""
    retries: bool = False
    """Whether a caller asks again, after Retry-After, where a 503 or a broken connection says that nothing began."""
    answers: list[CallResult] = field(default_factory=list)
    request_count: int = 0
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, in a thread."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._flow()), name="flood")
        self._thread.start()

    def stop(self) -> None:
        """Ask no more questions, and wait for the answers that are still to come."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def statuses(self) -> Counter[int]:
        """Return how often each status came."""
        return Counter(answer.status for answer in self.answers)

    @property
    def slowest(self) -> float:
        """Seconds that the longest answer took."""
        return max((answer.seconds for answer in self.answers), default=0.0)

    async def _flow(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a kept connection may close as it is used again
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session, asyncio.TaskGroup() as group:
            for number in range(self.callers):
                group.create_task(self._ask_on(session, number))

    async def _ask_on(self, session: aiohttp.ClientSession, number: int) -> None:
        turn = number
        await asyncio.sleep(START_GAP * number)
        while not self._stopping.is_set():
            self.request_count += 1
            began = time.monotonic()
            answer = await self._ask(session, self.gateways[turn % len(self.gateways)], f"Question {number}.{turn}")
            while self.retries and answer.status in (0, 503) and not answer.run:
                await asyncio.sleep(RETRY_PAUSE)
                turn += 1
                answer = await self._ask(session, self.gateways[turn % len(self.gateways)], f"Question {number}.{turn}")
            answer.seconds = time.monotonic() - began
            self.answers.append(answer)
            turn += 1
            await asyncio.sleep(self.pause if answer.status == 200 else max(self.pause, 0.5))

    async def _ask(self, session: aiohttp.ClientSession, gateway: Process, question: str) -> CallResult:
        body = {"model": self.model, "messages": user_message(question)}
        limit = aiohttp.ClientTimeout(total=120)
        try:
            async with session.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=limit) as reply:
                headers = {name.lower(): value for name, value in reply.headers.items()}
                document: dict[str, Any] = await reply.json(content_type=None)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return CallResult(status=0, code=type(error).__name__)
        if reply.status == 200:
            return CallResult(document["choices"][0]["message"]["content"], document, headers=headers)
        return CallResult("", document, reply.status, str(document.get("error", {}).get("code")), headers)


@contextmanager
def flood(gateways: Sequence[Process], callers: int, **more: Any) -> Iterator[Flood]:
    """Callers who ask for the length of the block; when it is left every question has its answer."""
    new_flood = Flood(gateways, callers, **more)
    new_flood.start()
    try:
        yield new_flood
    finally:
        new_flood.stop()
