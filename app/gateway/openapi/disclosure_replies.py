"""Models of the reply of `/v1/disclosures`. They document, as those of `replies.py` do."""

from typing import Literal

from app.gateway.openapi.replies import Reply


class Saw(Reply):
    """The parts of a run that a recipient saw."""

    user: bool
    """True if it saw the caller's words."""
    steps: list[int]
    """The steps whose outputs it saw."""
    tool_results: bool
    """True if it saw results of the caller's tools, which its own step had called."""


class PassedOver(Reply):
    """A worker that was not called, and why."""

    worker: str
    reason: str


class Withheld(Reply):
    """A part of the run that was not shown."""

    what: str
    """`user`, or `step:N`."""
    reason: Literal["not_listed", "no_words"]
    """`not_listed`: it is not on the access list, which `planned_by` wrote; `no_words`: the step ended without any."""


class Why(Reply):
    """The reasons why a recipient was shown what it saw, and why the rest was withheld."""

    planned_by: str
    """The author of the access list: `model`, `selector`, `fixed`, `random`, `caller` or `fallback`; `tier` for
    conductors and embedders, which the tier names."""
    attempt: int
    """The number of the attempt at its step, from 1; for a planning call the number of proposals."""
    passed_over: list[PassedOver]
    """The workers that were not called: for want of a clearance, by a rule, or because they failed."""
    withheld: list[Withheld]


class Disclosure(Reply):
    """One recipient of a call, and what it was sent."""

    id: str
    object: Literal["disclosure"]
    run: str
    call: str
    step: int | None
    at: float
    """When the intent was journaled, before anything was sent, in seconds since 1970."""
    recipient: str
    recipient_kind: Literal["worker", "conductor", "embedder", "shadow"]
    provider: str
    model: str
    region: str | None
    tenant: str
    key: str
    user: str | None
    """Null if the request named nobody, or if the run's content was erased."""
    labels: list[str]
    """The labels of all that it read."""
    saw: Saw
    bytes: int
    """The size of the request that was sent."""
    input_tokens: int | None
    output_tokens: int | None
    outcome: str | None
    """`ok`, `error`, `truncated`, `cancelled` or `unknown`; null while the call has not ended."""
    why: Why


class ListedDisclosure(Disclosure):
    """A disclosure with the name of the key that asked."""

    key_name: str | None
    """Null if the key is not in the database."""


class DisclosureList(Reply):
    """A page of disclosures."""

    object: Literal["list"]
    data: list[ListedDisclosure]
    first_id: str | None
    last_id: str | None
    has_more: bool
    next: str | None
