"""A task and what comes back from a model, free of any provider's or client's wire format.

Adapters in `gateway/` and `providers/` translate to and from these records; everything between them believes the types.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "content_filter", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """An image by `data:` URL or by a reference that the provider fetches; Baton never fetches it."""

    url: str
    detail: str | None = None


Part = Text | Image


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `parts` keep their order."""

    role: Role
    parts: tuple[Part, ...]
    name: str | None = None

    @property
    def text(self) -> str:
        """The message's text parts, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to decode; None means the provider's default. `max_tokens` caps the answer, not the orchestration."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """What the caller asked."""

    messages: tuple[Message, ...]
    sampling: Sampling = Sampling()
    user: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_images(self) -> bool:
        """Whether a worker needs to see images to do this task."""
        return any(isinstance(part, Image) for message in self.messages for part in message.parts)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one or several calls. `cached` is a subset of `input`, `reasoning` a subset of `output`.

    `estimated` is true when a provider reported nothing and the figures are our upper bound.
    """

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0
    estimated: bool = False

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
            self.estimated or other.estimated,
        )

    @property
    def total(self) -> int:
        """Input plus output tokens."""
        return self.input + self.output


@dataclass(frozen=True, slots=True)
class Words:
    """Some of the answer's text, as it streams."""

    text: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """One decoded token with its natural-log probability and the likeliest others, where the decoder tells."""

    token: str
    logprob: float
    others: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """The stream's terminal marker: without one, a stream was truncated. `usage` is None when none was reported."""

    finish: Finish
    usage: Usage | None
    model: str | None = None
    refused: bool = False


Piece = Words | Chosen | End


def task_to_json(task: Task) -> dict[str, Any]:
    """A task as plain JSON values, for the content store."""
    return {
        "messages": [message_to_json(message) for message in task.messages],
        "sampling": asdict(task.sampling),
        "user": task.user,
        "metadata": dict(task.metadata),
    }


def task_from_json(value: Mapping[str, Any]) -> Task:
    """The inverse of `task_to_json`; trusts its input, which only the content store gives."""
    sampling = dict(value["sampling"])
    sampling["stop"] = tuple(sampling["stop"])
    return Task(
        messages=tuple(message_from_json(message) for message in value["messages"]),
        sampling=Sampling(**sampling),
        user=value["user"],
        metadata=dict(value["metadata"]),
    )


def message_to_json(message: Message) -> dict[str, Any]:
    """A message as plain JSON values; parts by their fields."""
    parts = [
        {"text": part.text} if isinstance(part, Text) else {"url": part.url, "detail": part.detail}
        for part in message.parts
    ]
    return {"role": message.role, "parts": parts, "name": message.name}


def message_from_json(value: Mapping[str, Any]) -> Message:
    """The inverse of `message_to_json`."""
    parts: tuple[Part, ...] = tuple(Text(**part) if "text" in part else Image(**part) for part in value["parts"])
    return Message(role=value["role"], parts=parts, name=value["name"])


def usage_to_json(usage: Usage) -> dict[str, Any]:
    """A usage as plain JSON values; written out, because `asdict` copies deeply and this is on every call's path."""
    return {
        "input": usage.input,
        "cached": usage.cached,
        "output": usage.output,
        "reasoning": usage.reasoning,
        "estimated": usage.estimated,
    }


def usage_from_json(value: Mapping[str, Any]) -> Usage:
    """The inverse of `usage_to_json`."""
    return Usage(value["input"], value["cached"], value["output"], value["reasoning"], value["estimated"])
