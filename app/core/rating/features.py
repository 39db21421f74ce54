"""The features of a request for a selector: hashed words of the caller's last message, and a few counts. Pure, no
model.

A word becomes one of `WIDTH` places with a sign, by a hash that never changes, so that a posterior of yesterday still
means the same. All numbers are one word; how a number begins and how long it is are two more, that count half: they
distinguish a year from a sum, and this century from the one before. The vector of words has length 1, whatever the
text's.

Where an embedding of the text is available, it is added to the words and never replaces them: without it a posterior
that has learned both can still use what it has learned of the words. It is compressed to `SKETCH` numbers.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct

from app.core.message.chat import Message

VERSION = "words-2"
WIDTH = 1024
"""The number of places of words."""
MOST_CHARS = 4_000
"""Characters that are read from the beginning of a text, and as many from its end: what it asks for usually stands
there."""
SKETCH = 64
"""Numbers of an embedding, however many it had."""
EMBEDDING_MODELS = 1 << 20
"""Places for the embeddings of so many models: what was learned of one says nothing of another."""
_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")
_NUMBER = re.compile(r"\d+")
COUNTED = 5
"""The number of counts."""
SHAPE_WEIGHT = 0.5
"""The weight of the shape of a number, where a word has 1."""
LONG_NUMBER_DIGITS = 4
"""The number of digits from which on the first two are a feature, too."""


class Features(Struct, frozen=True):
    """A request as numbers. `words` are (place, value) pairs in the order of the places; the `COUNTED` `counts` are
    roughly within -3 and 3: the text's length, its numbers, the digits of the longest of them, its words and signs, and
    how many of these had been there before. `vector` is an embedding as `placed` makes it, or empty. `answer` is what a
    further round sees of the answer before it (`of_answer`), and is empty in the first round."""

    words: tuple[tuple[int, float], ...]
    counts: tuple[float, ...]
    vector: tuple[tuple[int, float], ...] = ()
    answer: tuple[tuple[int, float], ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the JSON form, as it is stored with a run's content."""
        pairs = {"words": self.words}
        if self.vector:
            pairs["vector"] = self.vector
        if self.answer:
            pairs["answer"] = self.answer
        plain: dict[str, object] = {"version": VERSION, "counts": list(self.counts)}
        for name, found in pairs.items():
            plain[name] = [list(pair) for pair in found]
        return plain


def from_json(value: dict[str, object]) -> Features | None:
    """Return the inverse of `Features.to_json`; None for features of another version."""
    if value.get("version") != VERSION:
        return None
    counts: list[float] = value["counts"]  # type: ignore[assignment]
    vector, answer = _pairs(value.get("vector", ())), _pairs(value.get("answer", ()))
    return Features(_pairs(value["words"]), tuple(map(float, counts)), vector, answer)


def _pairs(found: Any) -> tuple[tuple[int, float], ...]:
    return tuple((int(place), float(amount)) for place, amount in found)


def find_last_question(messages: Sequence[Message]) -> str:
    """Return the text of the caller's last message, or an empty string."""
    return next((message.text for message in reversed(messages) if message.role == "user"), "")


def excerpt(text: str) -> str:
    """Return the part of a text that features are made from."""
    if len(text) > 2 * MOST_CHARS:
        return f"{text[:MOST_CHARS]} {text[-MOST_CHARS:]}"
    return text


def features(text: str, vector: tuple[tuple[int, float], ...] = ()) -> Features:
    """Return the features of a text, with its embedding where there is one."""
    text = excerpt(text)
    numbers, said = _NUMBER.findall(text), _WORD.findall(text.casefold())
    counts = (
        math.log1p(len(text)) - 4.0,
        math.log1p(len(numbers)) - 1.0,
        math.log1p(max(map(len, numbers), default=0)) - 0.7,
        math.log1p(len(said)) - 2.8,
        math.log1p(len(said) - len({*said})) - 1.0,
    )
    return Features(words(text), counts, vector)


def of_answer(text: str) -> tuple[tuple[int, float], ...]:
    """Return the features of an answer: its words, and behind them the counts."""
    seen = features(text)
    return (*seen.words, *((WIDTH + place, count) for place, count in enumerate(seen.counts)))


def words(text: str) -> tuple[tuple[int, float], ...]:
    """Return the hashed words of a text, each counted once."""
    summed: dict[int, float] = {}
    weights: dict[str, float] = {}
    for word in {*_WORD.findall(text.casefold())}:
        if word[0].isdigit():
            weights |= _shapes(word)
        else:
            weights[word] = 1.0
    for word, weight in weights.items():
        bits = int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "big")
        signed = weight if bits >> 40 & 1 else -weight
        summed[bits % WIDTH] = summed.get(bits % WIDTH, 0.0) + signed
    found = sorted((place, amount) for place, amount in summed.items() if amount)
    length = math.sqrt(sum(amount * amount for _, amount in found))
    return tuple((place, amount / length) for place, amount in found)


def _shapes(number: str) -> dict[str, float]:
    """Return the features of a number: that it is one, and its shapes."""
    heads = (1, 2) if len(number) >= LONG_NUMBER_DIGITS else (1,)
    shapes = {number[:head] + "#" * (len(number) - head): SHAPE_WEIGHT for head in heads}
    return shapes | {"0": 1.0}


def sketch_embedding(vector: Sequence[float]) -> tuple[float, ...]:
    """Return an embedding in `SKETCH` numbers, of length 1: each of its own is added to one of them, with a sign, by a
    hash, so that inner products stay what they were on average (a count sketch). Raises ValueError for one without
    length."""
    found = [0.0] * SKETCH
    for (place, sign), value in zip(_signed_places(len(vector)), vector, strict=True):
        found[place] += sign * value
    length = math.sqrt(sum(value * value for value in found))
    if not 0 < length < math.inf:
        raise ValueError("a vector without length")
    return tuple(value / length for value in found)


@lru_cache(8)
def _signed_places(count: int) -> tuple[tuple[int, int], ...]:
    """Return, for each number of an embedding, the place that it is added to, and its sign."""
    hashed = [hashlib.blake2b(str(n).encode(), digest_size=2).digest() for n in range(count)]
    return tuple((place % SKETCH, 1 if bits & 1 else -1) for place, bits in hashed)


def sketch_to_features(sketch: Sequence[float], model: str) -> tuple[tuple[int, float], ...]:
    """Return a sketch as features: in places of its model's own."""
    bits = int.from_bytes(hashlib.blake2b(model.encode(), digest_size=8).digest(), "big")
    first = bits % EMBEDDING_MODELS * SKETCH
    return tuple((first + n, value) for n, value in enumerate(sketch) if value)
