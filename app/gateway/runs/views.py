"""A run as people look at it, as JSON: its graph, its timeline and its state at any instant, and two runs aligned.

All of it is computed from the journal by pure functions (`core/run/graph.py`, `timeline.py`, `instant.py` and
`core/rating/alignment.py`). The only texts in it are the first words of subtasks, which are content.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from app.core.rating.alignment import Hash, SideBySide, side_by_side
from app.core.rating.comparison import Same, figures
from app.core.rating.feedback import Feedback
from app.core.run.graph import Graph
from app.core.run.instant import Instant, instant
from app.errors import InvalidRequest
from app.gateway.wire import query
from app.store.protocol import ContentReads, Journal

FIRST_WORDS: Final = 96
"""Characters of a subtask that the graph has."""


def at_instant(journal: Journal, options: query.InstantOptions, now: float) -> Instant:
    """Return the run at the instant that a request names. Raises `InvalidRequest` if the journal has no such event, or
    if two instants are named."""
    if options.at is not None and options.t is not None:
        raise InvalidRequest("Name the instant by 'at' or by 't', not by both.", param="t", code="invalid_value")
    try:
        return instant(journal.events, now, seq=options.at, seconds=options.t)
    except ValueError:
        message = f"The journal of the run has {len(journal.events)} events so far."
        raise InvalidRequest(message, param="at", code="invalid_value") from None


async def with_words(store: ContentReads, run_graph: Graph, *, content: bool) -> dict[str, Any]:
    """Return the graph as JSON, where each step has the first words of its subtask or the reason why they are missing:
    `none` (it answers the conversation), `erased`, or `not_shown`."""
    data, run = run_graph.to_json(), run_graph.at.state.run
    refs = sorted({node.subtask for node in run_graph.nodes} - {""})
    texts: Mapping[str, bytes] = {}
    if content and refs:
        texts = await store.contents(run, refs)
    for node, fields in zip(run_graph.nodes, data["nodes"], strict=True):
        if node.kind == "step":
            fields["subtask"] = _words(node.subtask, texts, content=content)
    return data


def _words(ref: str, texts: Mapping[str, bytes], *, content: bool) -> dict[str, Any]:
    if not ref:
        return {"state": "none", "text": None}
    if not content:
        return {"state": "not_shown", "text": None}
    if ref not in texts:
        return {"state": "erased", "text": None}
    # Four bytes are the most that UTF-8 takes for a character, so that a long text is not decoded as a whole.
    text = texts[ref][: 4 * FIRST_WORDS + 4].decode("utf-8", "replace")
    if len(text) > FIRST_WORDS:
        text = text[: FIRST_WORDS - 1] + "…"
    return {"state": "given", "text": text}


async def align(
    store: ContentReads,
    journals: tuple[Journal, Journal],
    ratings: tuple[Sequence[Feedback], Sequence[Feedback]],
    *,
    reads: bool,
) -> SideBySide:
    """Align two runs; texts are compared, and subtasks matched, only if the caller `reads` the content of both."""
    first = figures(journals[0].events, ratings[0])
    second = figures(journals[1].events, ratings[1])
    if not reads:
        return side_by_side(first, second)
    texts = [await store.contents(run.run, run.refs) for run in (first, second)]
    return side_by_side(first, second, (_hashes(texts[0]), _hashes(texts[1])), same_texts(texts[0], texts[1]))


def _hashes(texts: Mapping[str, bytes]) -> Hash:
    def hash_of(ref: str) -> str:
        if ref not in texts:
            return ""
        return hashlib.sha256(texts[ref]).hexdigest()

    return hash_of


def same_texts(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Same:
    """Return the test whether texts of two runs are equal. It answers None for a text that was erased."""

    def same(first: str, other: str) -> bool | None:
        texts = before.get(first), after.get(other)
        if None in texts:
            return None
        return texts[0] == texts[1]

    return same
