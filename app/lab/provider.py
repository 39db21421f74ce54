"""A rehearsal provider whose workers are those of a world: the same seam, executor and journal as for real workers.

In the pool file: a provider of the format `rehearsal` with the option `world = "standard"`, and workers whose `model`
is a name of `world.profiles`. What it is not asked as one of them (a plan, say) it passes on to the rehearsal pool.
`delay` is a factor on a worker's seconds, `seed` deals other dice. A request with a seed of its own always gets the
same answer; without one every call has dice of its own, so that asking again can help. With `world = "2"` the workers
are those of the second world (`world2/provider.py`).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count
from typing import Any

from app.core.message.chat import End, Message, Piece, TextDelta, Usage, message_from_json
from app.core.pool.catalog import Deadlines, ProviderSpec
from app.errors import WorkerTimeout
from app.lab.workers import reply
from app.lab.world import profiles, seconds
from app.lab.world2.provider import SecondWorld, ServedReply
from app.providers.protocol import ClosableProvider, Request


class WorldProvider:
    """The workers of a world, in front of the rehearsal provider that renders their requests."""

    def __init__(self, spec: ProviderSpec, inner: ClosableProvider) -> None:
        self._inner = inner
        self._seed = spec.options.get("seed", "")
        self._delay = float(spec.options.get("delay", "1"))
        self._calls = count()
        self._second: SecondWorld | None = None
        if spec.options.get("world") == "2":
            self._second = SecondWorld(self._seed)
        self.unsupported = inner.unsupported

    def render(self, request: Request) -> bytes:
        """Return the request body of the rehearsal provider, so that an auditor needs to know nothing of worlds."""
        return self._inner.render(request)

    async def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """Answer from `body`, after as long as the worker takes, with the tokens that the world counts."""
        call = json.loads(body)
        answer = None
        if not call["schema"]:
            messages = tuple(map(message_from_json, call["messages"]))
            answer = self._answer(call["model"], messages, **_limits(call["sampling"]))
        if answer is None:
            async for pieces in self._inner.stream(request, body, deadlines):
                yield pieces
            return
        pause, allowed = answer.seconds * self._delay, min(deadlines.first, deadlines.total)
        await asyncio.sleep(min(pause, allowed))
        if pause > allowed:
            raise WorkerTimeout
        yield [TextDelta(answer.text)]
        yield [End(answer.finish, Usage(input=answer.input_tokens, output=answer.output_tokens), call["model"])]

    def _answer(
        self, model: str, messages: Sequence[Message], *, seed: int | None, most: int | None
    ) -> ServedReply | None:
        """Return the answer of a worker; None if the model is no worker of the world."""
        if self._second is not None:
            return self._second.answer(model, messages, seed=seed, most=most)
        worker = profiles().get(model)
        if worker is None:
            return None
        draw = str(seed)
        if seed is None:
            draw = f"call {next(self._calls)}"
        answer = reply(worker, messages, f"{self._seed}|{draw}")
        duration = seconds(worker, answer.output_tokens)
        return ServedReply(answer.text, answer.input_tokens, answer.output_tokens, duration)

    async def close(self) -> None:
        """Close the provider behind this one."""
        await self._inner.close()


def _limits(sampling: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the request's seed, and the most tokens that it allows."""
    return {"seed": sampling["seed"], "most": sampling["max_tokens"]}
