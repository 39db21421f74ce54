"""Readers for the untrusted JSON of providers: each returns the type that it promises or raises WorkerMalformed.

NaN, infinities and numbers beyond a double are refused with the document; lone surrogates and broken UTF-8 become
U+FFFD (Gemini has been seen to cut a pair in two), so that every string handed on can be encoded; NUL is text like any
other.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from app.core.message.chat import Chosen, Likely, Usage
from app.providers.faults import malformed

TOKENS = 100_000_000
"""Above any context window; a count beyond it is a fault, not a bill."""
_ESCAPES = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


def parse(data: bytes, who: str) -> dict[str, Any]:
    """Parse one JSON object; raises WorkerMalformed for anything else."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        value = _mended(data, who)
    if not isinstance(value, dict):
        raise malformed(who, "no JSON object")
    return value


def peek(data: bytes) -> object:
    """Parse the body of an error, or return None: it only refines what the HTTP status says."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def inner(value: object, who: str) -> dict[str, Any]:
    """Return an object, empty where it is absent."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise malformed(who, "a field of the wrong type")
    return value


def rows(value: object, who: str) -> list[dict[str, Any]]:
    """Return a list of objects, empty where it is absent."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise malformed(who, "a field of the wrong type")
    for row in value:
        if not isinstance(row, dict):
            raise malformed(who, "a field of the wrong type")
    return value


def words(value: object, who: str) -> str:
    """Return text, empty where it is absent."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise malformed(who, "a field of the wrong type")
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


def usage(into: object, out: object, cached: object = 0, reasoning: object = 0, stored: object = 0) -> Usage | None:
    """Return the billed tokens, with `cached` and `reasoning` cut to the totals that they are part of.

    `stored` is the part of the input that the provider wrote to its cache.

    None if a total is missing or both are zero.
    """
    read, written = count(into), count(out)
    if read is None or written is None or read + written == 0:
        return None
    kept = min(count(cached) or 0, read)
    return Usage(
        input=read,
        cached=kept,
        output=written,
        reasoning=min(count(reasoning) or 0, written),
        written=min(count(stored) or 0, read - kept),
    )


def tokens(value: object, who: str) -> list[Chosen]:
    """Return the tokens of an answer with their log-probabilities, which OpenAI's two formats write alike.

    The format lists the chosen token among the likeliest.
    """
    found = []
    for entry in rows(value, who):
        if (one := _likely(entry, who)) is not None:
            listed = [_likely(rival, who) for rival in rows(entry.get("top_logprobs"), who)]
            top = tuple(rival for rival in listed if rival is not None)
            others = tuple((rival.token, rival.logprob) for rival in top if rival.token != one.token)
            found.append(Chosen(one.token, one.logprob, others, one.raw, top))
    return found


def _likely(entry: Mapping[str, Any], who: str) -> Likely | None:
    """Return a token with its log-probability, or None."""
    if not isinstance(entry.get("logprob"), float | int):
        return None
    try:
        raw = None
        if isinstance(entry.get("bytes"), list):
            raw = bytes(entry["bytes"])
    except (TypeError, ValueError):
        raw = None
    return Likely(words(entry.get("token"), who), float(entry["logprob"]), raw)


def _mended(data: bytes, who: str) -> Any:
    text = data.decode("utf-8", "replace")
    text = _ESCAPES.sub(lambda match: "\\ufffd" if match[1] else match[0], text)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise malformed(who, "no JSON") from None
