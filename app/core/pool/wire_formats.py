"""The facts about each wire format that are not in its adapter: one entry of `FORMATS` for each format."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

WireFormat = Literal["openai", "responses", "anthropic", "gemini", "rehearsal", "embeddings"]
Auth = Literal["key", "api-key", "azure", "aws", "google"]


class FormatFacts(Struct, frozen=True, kw_only=True):
    """The facts that hold for every endpoint of one wire format."""

    auth: tuple[Auth, ...] = ("key",)
    """How its requests may be authenticated; see `providers/authentication.py`."""
    options: Mapping[str, tuple[str, ...]] = {}
    """The values of each option of its own that an endpoint in the pool file may have; () allows any. What an option
    does is told by the docstring of the format's adapter."""
    lacks: frozenset[str] = frozenset()
    """The fields of `Sampling` that it does not have."""
    takes_sampling: bool = True
    """False if nothing of `Sampling` is sent, so that a table of its parameters would have no effect."""
    has_json_mode: bool = False
    """True if an answer can be held to any JSON object (`response_format: json_object`)."""
    form_or_tools: str = ""
    """A pattern of the models that take no form of the answer beside tools."""
    undecoded: frozenset[str] = frozenset()
    """The keywords of JSON schemas that its decoders do not take. They are left out of the schema that is sent, which
    then only allows more."""
    has_logprobs: bool = False
    """True if replies may have log-probabilities."""
    envelope_bytes: int = 0
    """About the bytes of a request of one or two messages beyond those of the messages and of the model's name."""


FORMATS: Mapping[WireFormat, FormatFacts] = {
    "openai": FormatFacts(
        auth=("key", "api-key", "azure", "aws", "google"),
        options={
            "max_tokens_field": ("max_tokens", "max_completion_tokens"),
            "stream_options": ("send", "omit"),
            "developer_role": ("keep", "system"),
            "reasoning": ("return", "drop"),
            "tool_ids": ("keep", "short"),
        },
        has_json_mode=True,
        has_logprobs=True,
        envelope_bytes=55,
    ),
    "responses": FormatFacts(
        auth=("key", "api-key", "azure", "aws"),
        options={"reasoning": ("return", "drop")},
        lacks=frozenset(("stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias")),
        has_json_mode=True,
        has_logprobs=True,
        envelope_bytes=110,
    ),
    "anthropic": FormatFacts(
        auth=("key", "api-key", "azure", "aws", "google"),
        options={"anthropic_version": (), "cache": ("off", "tools")},
        lacks=frozenset(("seed", "presence_penalty", "frequency_penalty", "logit_bias")),
        undecoded=frozenset(
            (
                *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"),
                *("minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties"),
            )
        ),
        envelope_bytes=45,
    ),
    "gemini": FormatFacts(
        auth=("key", "google"),
        lacks=frozenset(("logit_bias",)),
        has_json_mode=True,
        form_or_tools=r"gemini-[12]\b",
        envelope_bytes=30,
    ),
    "rehearsal": FormatFacts(
        options={"seed": (), "delay": (), "first_ms": (), "chunk_ms": (), "world": ("standard", "2")},
        takes_sampling=False,
        has_logprobs=True,
        envelope_bytes=204,
    ),
    "embeddings": FormatFacts(
        auth=("key", "api-key", "azure"),
        options={"dimensions": (), "shortens": ("true", "false")},
        takes_sampling=False,
    ),
}
