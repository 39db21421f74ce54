"""Readers for the untrusted JSON of providers: each returns the type that it promises or raises WorkerMalformed.

NaN, infinities and numbers beyond a double are refused with the document; lone surrogates and broken UTF-8 become
U+FFFD (Gemini has been seen to cut a pair in two), so that every string handed on can be encoded; NUL is text like any
other.

Tool calls are read here too, in the same way for all formats: a call gets its number when it begins, and is held back
until its name has come.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from app.core.message.chat import (
    ChosenToken,
    Finish,
    LikelyToken,
    Piece,
    ToolDelta,
    Usage,
)
from app.core.message.nesting import is_deeper
from app.providers.faults import malformed_reply

TOKENS = 100_000_000
"""Above any context window; a count beyond it is a fault, not a bill."""
MOST_LOGPROBS = 20
"""The most alternatives of a token that OpenAI's two formats let be asked for."""
MOST_LEVELS = 64
"""The deepest nesting of a reply's JSON that is handed on. The JSON library reads 1,024 levels and writes 254."""
DOCUMENT_NAME = "document.pdf"
"""The file name of a PDF that has none; OpenAI's two formats want one."""
_ESCAPES = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


def parse(data: bytes, sender: str) -> dict[str, Any]:
    """Parse one JSON object; raises WorkerMalformed for anything else."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        value = _repair_json(data, sender)
    if not isinstance(value, dict):
        raise malformed_reply(sender, "no JSON object")
    return value


def refuse_deep(value: object, sender: str) -> None:
    """Raise WorkerMalformed for JSON that is nested too deeply to be stored and sent again."""
    if is_deeper(value, MOST_LEVELS):
        raise malformed_reply(sender, f"JSON of more than {MOST_LEVELS} levels")


def peek(data: bytes) -> object:
    """Parse the body of an error, or return None: it only refines what the HTTP status says."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def object_or_empty(value: object, sender: str) -> dict[str, Any]:
    """Return an object, empty where it is absent."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise malformed_reply(sender, "a field of the wrong type")
    return value


def rows(value: object, sender: str) -> list[dict[str, Any]]:
    """Return a list of objects, empty where it is absent."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise malformed_reply(sender, "a field of the wrong type")
    for row in value:
        if not isinstance(row, dict):
            raise malformed_reply(sender, "a field of the wrong type")
    return value


def words(value: object, sender: str) -> str:
    """Return text, empty where it is absent."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise malformed_reply(sender, "a field of the wrong type")
    return value


def position(value: object, sender: str) -> object:
    """Return the index by which the pieces of one part of a reply are told from those of others; None where it is
    absent. Servers number their parts in several ways, so that anything may be an index but a list or an object."""
    if isinstance(value, dict | list):
        raise malformed_reply(sender, "a field of the wrong type")
    return value


def label(value: object) -> str | None:
    """Return a short name that is only reported and never relied upon, such as a model id."""
    if isinstance(value, str) and value:
        return value[:200]
    return None


def count(value: object) -> int | None:
    """Return a plausible number of tokens, or None."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is int and 0 <= value <= TOKENS:
        return value
    return None


def usage(
    input_tokens: object, output_tokens: object, cached: object = 0, reasoning: object = 0, stored: object = 0
) -> Usage | None:
    """Return the billed tokens, with `cached` and `reasoning` cut to the totals that they are part of; None if a total
    is missing or both are zero.

    `stored` is the part of the input that the provider wrote to its cache.
    """
    input_count, output_count = count(input_tokens), count(output_tokens)
    if input_count is None or output_count is None or input_count + output_count == 0:
        return None
    cached_tokens = min(count(cached) or 0, input_count)
    return Usage(
        input=input_count,
        cached=cached_tokens,
        output=output_count,
        reasoning=min(count(reasoning) or 0, output_count),
        written=min(count(stored) or 0, input_count - cached_tokens),
    )


def usage_detail(counts: Mapping[str, Any], name: str, field: str) -> object:
    """Return one count of the details of a usage, which stand in an object of this `name`; None where it is absent."""
    details = counts.get(name)
    if not isinstance(details, dict):
        return None
    return details.get(field)


def tokens(value: object, sender: str) -> list[ChosenToken]:
    """Return the tokens of an answer with their log-probabilities, which OpenAI's two formats write alike.

    The format lists the chosen token among the likeliest.
    """
    chosen_tokens: list[ChosenToken] = []
    for entry in rows(value, sender):
        likely = _likely(entry, sender)
        if likely is None:
            continue
        top: list[LikelyToken] = []
        alternatives: list[tuple[str, float]] = []
        for row in rows(entry.get("top_logprobs"), sender):
            alternative = _likely(row, sender)
            if alternative is None:
                continue
            top.append(alternative)
            if alternative.token != likely.token:
                alternatives.append((alternative.token, alternative.logprob))
        chosen_tokens.append(ChosenToken(likely.token, likely.logprob, tuple(alternatives), likely.raw, tuple(top)))
    return chosen_tokens


def _likely(entry: Mapping[str, Any], sender: str) -> LikelyToken | None:
    """Return a token with its log-probability, or None."""
    if not isinstance(entry.get("logprob"), float | int):
        return None
    try:
        raw = None
        if isinstance(entry.get("bytes"), list):
            raw = bytes(entry["bytes"])
    except (TypeError, ValueError):
        raw = None
    return LikelyToken(words(entry.get("token"), sender), float(entry["logprob"]), raw)


def _repair_json(data: bytes, sender: str) -> Any:
    text = data.decode("utf-8", "replace")
    text = _ESCAPES.sub(lambda match: "\\ufffd" if match[1] else match[0], text)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise malformed_reply(sender, "no JSON") from None


# -- tool calls

EMPTY_SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The schema of a tool without arguments."""


class StreamedCalls:
    """The tool calls of one reply, numbered from 0 as they begin."""

    __slots__ = ("_current", "_ids", "_nameless", "_sender")

    def __init__(self, sender: str) -> None:
        """`sender` is named in errors."""
        self._sender = sender
        self._ids: list[str] = []
        self._current: dict[object, int] = {}
        """The latest call under each of the server's keys."""
        self._nameless: dict[object, tuple[str, list[str]]] = {}
        """Id and arguments that came before their call's name."""

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, key: object) -> bool:
        """Return True if a call has begun under this key of the server's."""
        return key in self._current

    def take(self, key: object, id_: str, name: str, arguments: str, pieces: list[Piece]) -> int | None:
        """Take more of the call that the server numbers `key`; return its number, or None while it has no name yet.

        A name with another id than before under the same key begins another call: some servers number all of them 0.
        """
        current = self._current.get(key)
        if name and (current is None or (id_ and id_ != self._ids[current])):
            waiting_id, waiting_arguments = self._nameless.pop(key, ("", []))
            current = self._current[key] = len(self._ids)
            self._ids.append(id_ or waiting_id)
            pieces.append(ToolDelta(current, id_ or waiting_id, name, "".join((*waiting_arguments, arguments))))
        elif current is not None:
            if arguments:
                pieces.append(ToolDelta(current, arguments=arguments))
        else:
            waiting_id, waiting_arguments = self._nameless.get(key, ("", []))
            waiting_arguments.append(arguments)
            self._nameless[key] = (id_ or waiting_id, waiting_arguments)
        return current

    def finish(self, reported: Finish) -> Finish:
        """Return the finish reason that fits the calls which came: OpenAI gives `stop` after a call that was demanded.
        Raises WorkerMalformed if a call never got its name."""
        if self._nameless:
            raise malformed_reply(self._sender, "a tool call without a name")
        if reported not in ("stop", "tool_calls"):
            return reported
        if self._ids:
            return "tool_calls"
        return "stop"


def arguments_text(arguments: object, sender: str) -> str:
    """Return arguments as JSON text, whether they came as text or as an object."""
    if isinstance(arguments, dict):
        refuse_deep(arguments, sender)
        return orjson.dumps(arguments).decode()
    return words(arguments, sender)


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return arguments as an object, for formats that want one; other values, from another history, are wrapped, and
    what is nested too deeply is wrapped as text."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = arguments
    if is_deeper(value, MOST_LEVELS):
        value = arguments
    if isinstance(value, dict):
        return value
    return {"arguments": value}
