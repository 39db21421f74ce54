"""The worst-case cost of a call, and the estimated cost of a call without reported usage (D7).

A token is at least one byte of text in every tokenizer in use, so the bytes of the text bound the input from above.
"""

import json
from collections.abc import Sequence

from app.core.message.chat import Document, Image, Message, Part, Toolbox, Usage, toolbox_to_json
from app.core.pool.catalog import Worker

PER_MESSAGE = 16
PER_IMAGE = 6_000
"""Above what the three wire formats bill for the largest image at high detail."""
PER_PAGE = 6_000
"""Above what providers bill for the text and the picture of a page of a PDF. The number of its pages is estimated by
`PAGE_CHARS`, so what is reserved for a PDF is likely to be enough, and no bound."""
PAGE_CHARS = 100_000
"""Characters of a PDF in base64 for each of its pages."""
MOST_PAGES = 100
"""The most that Anthropic takes in one request; other providers take more."""


def input_bound(messages: Sequence[Message], extra_bytes: int = 0) -> int:
    """Return an upper bound of the input tokens; `extra_bytes` is for schemas and the like that the provider adds."""
    bound = PER_MESSAGE * (len(messages) + 1) + extra_bytes
    for message in messages:
        bound += len(message.name or "")
        for part in message.parts:
            bound += _of_part(part)
        if message.calls or message.keepsake:
            bound += _of_tools(message)
    return bound


def _of_part(part: Part) -> int:
    if isinstance(part, Image):
        return PER_IMAGE
    if isinstance(part, Document):
        return PER_PAGE * min(1 + len(part.url) // PAGE_CHARS, MOST_PAGES)
    return len(part.text.encode())


def tool_bytes(toolbox: Toolbox) -> int:
    """About what the definitions of tools add to a request."""
    if not toolbox.tools:
        return 0
    return len(json.dumps(toolbox_to_json(toolbox)))


def _of_tools(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments.encode()) + PER_MESSAGE for call in message.calls)
    if not message.keepsake:
        return calls
    return calls + len(json.dumps(message.keepsake))


def worst_case(worker: Worker, input_tokens: int, output_tokens: int) -> tuple[int, int]:
    """(micro-dollars, tokens) to reserve before a call, at the dearest of the rates that it may be billed at: nobody
    promises that cached input is the cheaper one."""
    return worker.price.worst(input_tokens, output_tokens), input_tokens + output_tokens


def affordable_output(worker: Worker, input_tokens: int, wanted: int, *, floor: int, usd: int, tokens: int) -> int:
    """Return the largest number of output tokens, of at most `wanted`, whose worst case fits `usd` micro-dollars and
    `tokens`.

    0 if even `floor` tokens do not fit. A call that wants less than the floor is never cut.
    """
    low, high = min(floor, wanted), wanted
    if not _fits(worker, input_tokens, low, usd, tokens):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(worker, input_tokens, middle, usd, tokens):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(worker: Worker, input_tokens: int, output_tokens: int, usd: int, tokens: int) -> bool:
    hold = worst_case(worker, input_tokens, output_tokens)
    return hold[0] <= usd and hold[1] <= tokens


def estimate(messages: Sequence[Message], text: str) -> Usage:
    """Return the likely usage of a complete call whose provider reported none: four bytes a token, marked as
    estimated."""
    return Usage(input=-(-input_bound(messages) // 4), output=-(-len(text.encode()) // 4), estimated=True)


def cancelled(messages: Sequence[Message], output_tokens: int, text: str) -> Usage:
    """Return the likely usage of a streamed call that was cancelled: its input, and what had been received by then. A
    provider stops when its connection is closed, so that the rest is not billed."""
    likely = estimate(messages, text)
    return Usage(input=likely.input, output=min(likely.output, output_tokens), estimated=True)


def broken(input_tokens: int, output_tokens: int, text: str, unheard: int) -> Usage:
    """Return an upper bound for a call that broke off: all of its input, and what was received at one token a byte.

    `unheard` is what the worker may have written without our hearing of it: everything, if its reply was to come whole.
    """
    received = len(text.encode()) + PER_MESSAGE
    return Usage(input=input_tokens, output=min(max(received, unheard), output_tokens), estimated=True)
