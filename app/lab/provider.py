"""A rehearsal provider whose workers are those of a world: the same seam, executor and journal as for real workers.

In the pool file: a provider of the format `rehearsal` with the option `world = "standard"`, and workers whose `model`
is a name of `world.profiles`. What it is not asked as one of them (a plan, say) it passes on to the rehearsal pool.
`delay` is a factor on a worker's seconds, `seed` deals other dice. A request with a seed of its own always gets the
same answer; without one every call has dice of its own, so that asking again can help. With `world = "2"` the workers
are those of the second world (`world2/provider.py`).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from app.core.message.chat import End, Message, Piece, Usage, Words, message_from_json
from app.core.pool.catalog import Deadlines, ProviderSpec
from app.errors import ConfigInvalid, WorkerTimeout
from app.lab.workers import reply
from app.lab.world import profiles, seconds
from app.providers.protocol import ClosableProvider, Request

if TYPE_CHECKING:
    from app.lab.world2.provider import SecondWorld

SECOND = "app.lab.world2.provider:SecondWorld"
"""Imported by name when a pool file asks for it: it needs numpy, which the service does not."""


class WorldProvider:
    """The workers of a world, in front of the rehearsal provider that renders their requests."""

    def __init__(self, spec: ProviderSpec, inner: ClosableProvider) -> None:
        self._inner = inner
        self._seed = spec.options.get("seed", "")
        self._delay = float(spec.options.get("delay", "1"))
        self._calls = count()
        self._second = _second(self._seed) if spec.options.get("world") == "2" else None
        self.unsupported = inner.unsupported

    def render(self, request: Request) -> bytes:
        """Return the request body of the rehearsal provider, so that an auditor needs to know nothing of worlds."""
        return self._inner.render(request)

    async def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """Answer from `body`, after as long as the worker takes, with the tokens that the world counts."""
        call = json.loads(body)
        messages = tuple(message_from_json(message) for message in call["messages"])
        said = None if call["schema"] else self._answer(call["model"], messages, call["sampling"]["seed"])
        if said is None:
            async for pieces in self._inner.stream(request, body, deadlines):
                yield pieces
            return
        text, read, written, lasts = said
        pause, allowed = lasts * self._delay, min(deadlines.first, deadlines.total)
        await asyncio.sleep(min(pause, allowed))
        if pause > allowed:
            raise WorkerTimeout
        yield [Words(text)]
        yield [End("stop", Usage(input=read, output=written), call["model"])]

    def _answer(self, model: str, messages: Sequence[Message], seed: int | None) -> tuple[str, int, int, float] | None:
        """Text, tokens read and written, and seconds; None for who is no worker of the world."""
        if self._second is not None:
            answered = self._second.answer(model, messages)
            if answered is None:
                return None
            return answered[0].text, round(answered[0].read), round(answered[0].written), answered[1]
        worker = profiles().get(model)
        if worker is None:
            return None
        drawn = f"call {next(self._calls)}" if seed is None else str(seed)
        said = reply(worker, messages, f"{self._seed}|{drawn}")
        return said.text, said.read, said.written, seconds(worker, said.written)

    async def close(self) -> None:
        """There is nothing to close but what stands behind."""
        await self._inner.close()


def _second(seed: str) -> "SecondWorld":
    """The workers of the second world. Raises `ConfigInvalid` where numpy is not installed."""
    try:
        made: SecondWorld = resolve_name(SECOND)(seed)
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        remedy = "`pip install 'baton[lab]'` adds it"
        raise ConfigInvalid([f'a provider with world = "2" needs numpy, which is not installed; {remedy}']) from None
    return made
