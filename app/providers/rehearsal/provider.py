"""The provider of the rehearsal workers: no network and no key, but the same protocol, limits and usage.

`render` gives canonical JSON, and `stream` works from those bytes alone, so that what was journaled is what was done.
Options, all strings: `delay` is a factor on every pause (0 for none), `first_ms` and `chunk_ms` replace a worker's own
pauses, `seed` deals other dice.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from math import log
from typing import Any

from msgspec.structs import asdict

from app.core.message.chat import (
    ChosenToken,
    End,
    Finish,
    LikelyToken,
    Message,
    Piece,
    TextDelta,
    ToolDelta,
    Usage,
    message_from_json,
    message_to_json,
    toolbox_from_json,
    toolbox_to_json,
)
from app.core.message.response_format import without_instruction
from app.core.pool.catalog import Deadlines, ProviderSpec
from app.errors import WorkerTimeout
from app.providers.protocol import Request
from app.providers.rehearsal import gadgets, planner
from app.providers.rehearsal.answering import find_final_answer, reply
from app.providers.rehearsal.filled_schema import fill_schema

TOKEN = re.compile(r"\s*\w{1,4}|\s*[^\w\s]|\s+")
CHUNK = 3
"""Tokens that come at once."""
PER_MESSAGE, PER_IMAGE = 4, 85
PAUSES = {
    "sage": (30, 3), "abacus": (45, 5), "almanac": (40, 4), "scribe": (20, 2), "lawyer": (70, 8), "conductor": (25, 1),
}  # fmt: skip
"""Milliseconds to the first token and between chunks."""


UNSUPPORTED = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"})
"""A simulated worker's dice are dealt by the seed alone."""


class RehearsalProvider:
    """Simulated workers."""

    def __init__(self, spec: ProviderSpec, key: object = None, proxy_credentials: object = None) -> None:
        """Read the options. The secrets are parameters of every adapter; this one needs none."""
        self._options = spec.options
        self._seed = spec.options.get("seed", "")
        self.unsupported = UNSUPPORTED

    def render(self, request: Request) -> bytes:
        """Return the canonical JSON of the request."""
        body = {
            "model": request.worker.model,
            "messages": [message_to_json(message) for message in request.messages],
            "sampling": asdict(request.sampling),
            "schema": request.form.schema if request.form is not None else None,
            "logprobs": request.logprobs,
        }
        if request.toolbox.tools:
            body["toolbox"] = toolbox_to_json(request.toolbox)
        return json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")

    async def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """Answer from `body`: words in small batches, and one End."""
        call = json.loads(body)
        messages = tuple(message_from_json(message) for message in call["messages"])
        # The answer has its form in any case; the words that ask for it would be taken for the question.
        read = without_instruction(messages)
        first, pause_between = self._pauses(call["model"])
        clock = _Clock(deadlines.total)
        calls = self._calls(call, read)
        if calls:
            await clock.pause(first, deadlines.first)
            for piece in calls:
                yield [piece]
                await clock.pause(pause_between, deadlines.gap)
            output_tokens = sum(len(TOKEN.findall(piece.name + piece.arguments)) for piece in calls)
            yield [End("tool_calls", Usage(_size(messages), output=output_tokens), call["model"])]
            return
        wants_json = call["schema"] is None and len(read) < len(messages)
        tokens, odds = self._answer(call, read, wants_json=wants_json)
        tokens, finish, stopped = _cut(tokens, call["sampling"]["max_tokens"], tuple(call["sampling"]["stop"]))
        await clock.pause(first, deadlines.first)
        for start in range(0, len(tokens), CHUNK):
            if start:
                await clock.pause(pause_between, deadlines.gap)
            yield _pieces(tokens[start : start + CHUNK], start, odds, call["logprobs"])
        usage = Usage(input=_size(messages), output=len(tokens))
        yield [End(finish, usage, call["model"], stop_sequence=stopped)]

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _answer(
        self, call: Mapping[str, Any], messages: tuple[Message, ...], *, wants_json: bool
    ) -> tuple[list[str], dict[int, Mapping[int, float]]]:
        """Return the answer's tokens, as a JSON object of any form if one is wanted; for a plan also the odds of each
        worker choice, by the place of its token."""
        schema = call["schema"]
        if call["model"] == "conductor" or planner.is_plan_schema(schema):
            choices = planner.plan(messages, schema)
            if choices is not None:
                tokens = TOKEN.findall(planner.to_text(choices, schema))
                return tokens, _places(tokens, choices)
        result = gadgets.latest_results(messages)
        text = self._answer_in_words(call, messages) if result is None else f"The answer is {result}."
        if wants_json:  # a value, and no sentence, as most programs want it
            text = json.dumps({"answer": find_final_answer(text) or text})
        if schema is not None:
            text = fill_schema(schema, text)
        return TOKEN.findall(text), {}

    def _calls(self, call: Mapping[str, Any], messages: tuple[Message, ...]) -> list[ToolDelta]:
        """Return the tool calls to make instead of an answer, each in two pieces: its name, then its arguments."""
        if "toolbox" not in call:
            return []
        deltas: list[ToolDelta] = []
        wishes = gadgets.choose_calls(
            toolbox_from_json(call["toolbox"]), messages, lambda: self._answer_in_words(call, messages)
        )
        for index, (name, arguments) in enumerate(wishes):
            id_ = f"rehearsed_{len(messages)}_{index}"
            deltas += [ToolDelta(index, id_, name), ToolDelta(index, arguments=json.dumps(arguments))]
        return deltas

    def _answer_in_words(self, call: Mapping[str, Any], messages: tuple[Message, ...]) -> str:
        """Return the worker's answer in words."""
        return reply(call["model"], messages, f"{self._seed}|{call['sampling']['seed']}")

    def _pauses(self, model: str) -> tuple[float, float]:
        """Return the seconds to the first token and between chunks."""
        own = PAUSES.get(model, (40, 4))
        factor = float(self._options.get("delay", "1")) / 1000
        first = float(self._options.get("first_ms", own[0]))
        return first * factor, float(self._options.get("chunk_ms", own[1])) * factor


class _Clock:
    """Sleeps, within the deadlines."""

    def __init__(self, total: float) -> None:
        self._end = time.monotonic() + total

    async def pause(self, seconds: float, allowed: float) -> None:
        allowed = min(allowed, self._end - time.monotonic())
        await asyncio.sleep(max(0.0, min(seconds, allowed)))
        if seconds > allowed:
            raise WorkerTimeout


def _cut(tokens: list[str], max_tokens: int | None, stops: tuple[str, ...]) -> tuple[list[str], Finish, str]:
    """Return the tokens before the first stop sequence or up to the token limit, whichever comes first, and that
    sequence."""
    text, stopped = "".join(tokens), ""
    ends: list[tuple[int, str]] = []
    for stop in stops:
        place = text.find(stop)
        if stop and place >= 0:
            ends.append((place, stop))
    if ends:
        place, stopped = min(ends)
        tokens = TOKEN.findall(text[:place])
    if max_tokens is not None and len(tokens) > max_tokens:
        return tokens[:max_tokens], "length", ""
    return tokens, "stop", stopped


def _pieces(
    tokens: list[str], start: int, odds: Mapping[int, Mapping[int, float]], alternatives: int | None
) -> list[Piece]:
    pieces: list[Piece] = [TextDelta("".join(tokens))]
    if alternatives is not None:
        pieces += [_token_choice(token, odds.get(start + place), alternatives) for place, token in enumerate(tokens)]
    return pieces


def _token_choice(token: str, odds: Mapping[int, float] | None, alternatives: int) -> ChosenToken:
    """Return a token's log-probability: certain, but for the choice of a worker."""
    if odds is None:
        likely = LikelyToken(token, 0.0, token.encode())
        return ChosenToken(token, 0.0, raw=likely.raw, top=(likely,)[:alternatives])
    likeliest = [(f" {ordinal}", log(chance)) for ordinal, chance in list(odds.items())[:alternatives]]
    return ChosenToken(token, log(odds[int(token)]), tuple(likeliest))


def _places(tokens: list[str], choices: list[planner.Choice]) -> dict[int, Mapping[int, float]]:
    """Return the places of the worker ordinals among the tokens: after `"worker":`."""
    text, places = "", []
    for place, token in enumerate(tokens):
        if text.endswith('"worker":'):
            places.append(place)
        text += token
    return {place: choice.odds for place, choice in zip(places, choices, strict=False)}


def _size(messages: tuple[Message, ...]) -> int:
    """Return the number of input tokens by the same tokenizer."""
    texts = sum(len(TOKEN.findall(message.text)) + PER_MESSAGE for message in messages)
    images = sum(not hasattr(part, "text") for message in messages for part in message.parts)
    return texts + PER_IMAGE * images
