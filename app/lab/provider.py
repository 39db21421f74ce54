"""A rehearsal provider whose workers are those of a world: the same seam, executor and journal as for real workers.

In the pool file: a provider of the format `rehearsal` with the option `world = "standard"`, and workers whose `model`
is a name of `world.profiles`. What it is not asked as one of them (a plan, say) it passes on to the rehearsal pool.
`delay` is a factor on a worker's seconds, `seed` deals other dice.
"""

import asyncio
import json
from collections.abc import AsyncIterator

from app.core.message.chat import End, Piece, Usage, Words, message_from_json
from app.core.pool.catalog import Deadlines, ProviderSpec
from app.errors import WorkerTimeout
from app.lab.workers import reply
from app.lab.world import profiles, seconds
from app.providers.protocol import ClosableProvider, Request


class WorldProvider:
    """The workers of a world, in front of the rehearsal provider that renders their requests."""

    def __init__(self, spec: ProviderSpec, inner: ClosableProvider) -> None:
        self._inner = inner
        self._seed = spec.options.get("seed", "")
        self._delay = float(spec.options.get("delay", "1"))
        self.unsupported = inner.unsupported

    def render(self, request: Request) -> bytes:
        """Return the request body of the rehearsal provider, so that an auditor needs to know nothing of worlds."""
        return self._inner.render(request)

    async def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """Answer from `body`, after as long as the worker takes, with the tokens that the world counts."""
        call = json.loads(body)
        worker = profiles().get(call["model"])
        if worker is None or call["schema"]:
            async for pieces in self._inner.stream(request, body, deadlines):
                yield pieces
            return
        messages = tuple(message_from_json(message) for message in call["messages"])
        said = reply(worker, messages, f"{self._seed}|{call['sampling']['seed']}")
        pause, allowed = seconds(worker, said.written) * self._delay, min(deadlines.first, deadlines.total)
        await asyncio.sleep(min(pause, allowed))
        if pause > allowed:
            raise WorkerTimeout
        yield [Words(said.text)]
        yield [End("stop", Usage(input=said.read, output=said.written), call["model"])]

    async def close(self) -> None:
        """There is nothing to close but what stands behind."""
        await self._inner.close()
