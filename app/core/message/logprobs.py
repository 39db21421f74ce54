"""The log-probabilities of an answer: one plain JSON entry a token, as OpenAI writes them.

Entries are made once, from the output of a worker's decoder, and then stored, streamed and returned unchanged.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from app.core.message.chat import Chosen, Likely

Decoded = Mapping[str, Any]


def decoded(chosen: Chosen) -> dict[str, Any]:
    """A decoded token: itself, its natural-log probability, its bytes where they are known, and the likeliest."""
    likely = Likely(chosen.token, chosen.logprob, chosen.raw)
    return _figures(likely) | {"top_logprobs": [_figures(one) for one in chosen.top]}


def _figures(likely: Likely) -> dict[str, Any]:
    raw = None if likely.raw is None else list(likely.raw)
    return {"token": likely.token, "logprob": likely.logprob, "bytes": raw}


def size(one: Decoded) -> int:
    """The characters of its tokens: what a worker that says too much is measured by."""
    return len(one["token"]) + sum(1 + len(likely["token"]) for likely in one["top_logprobs"])


def spoken(tokens: Sequence[Decoded], chars: int) -> int:
    """Return the number of tokens that hold the first `chars` characters.

    A character is counted with the first of its bytes, since a token may be a part of one.
    """
    for place, one in enumerate(tokens):
        if chars <= 0:
            return place
        raw = one["token"].encode() if one["bytes"] is None else one["bytes"]
        chars -= sum(byte & 0xC0 != 0x80 for byte in raw)
    return len(tokens)
