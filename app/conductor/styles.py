"""The prompts for a model conductor, by their names in the pool file.

`general` explains everything in words, for any chat model. `compact` and `worded` are for models that were trained on
the compact prompt and write a subtask as one token or word by word; `cards` is for models that were trained to plan by
the workers' measured cards. The engine and the auditor both take a style from here, so that a planning request can be
made again from its brief.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from app.conductor import cards, compact, prompt
from app.conductor.protocol import Brief
from app.core.message.chat import Message
from app.core.plan import proposals


class Style(Struct, frozen=True):
    """A way to present a brief to a model, and the bounds of its plan."""

    messages: Callable[[Brief], tuple[Message, ...]]
    template: Callable[[Brief], str]
    """Returns the name of the prompt for a brief, which is one of `templates`."""
    templates: tuple[str, ...]
    answer_tokens: Callable[[int], int]
    """Returns the most tokens that a plan of so many steps may take."""
    subtask_chars: int
    """Characters of the longest subtask."""
    offers_tools: bool
    """True if a plan says which steps may call the caller's tools; otherwise only the answering step may."""
    gives_reasons: bool = False
    """True if a conductor can be asked for the reasons of its plan."""

    def schema(self, brief: Brief, *, positional: bool) -> dict[str, Any]:
        """Return the JSON schema of a plan for this brief."""
        return proposals.schema(
            len(brief.workers) + brief.nests,
            brief.limits.steps,
            self.subtask_chars,
            positional=positional,
            tools=self.offers_tools and bool(brief.task.toolbox.tools),
            further=brief.round > 1,
            reasons=self.gives_reasons and brief.reasons,
        )

    def most_tokens(self, brief: Brief) -> int:
        """Return the most tokens that a plan for this brief may take."""
        plan = self.answer_tokens(brief.limits.steps)
        if not (self.gives_reasons and brief.reasons):
            return plan
        return plan + prompt.REASON_TOKENS * (2 * brief.limits.steps + 1)


STYLES: Mapping[str, Style] = {
    "general": Style(
        prompt.messages,
        prompt.template,
        prompt.TEMPLATES,
        prompt.answer_tokens,
        prompt.SUBTASK_CHARS,
        offers_tools=True,
        gives_reasons=True,
    ),
    "compact": Style(
        compact.messages,
        lambda _: compact.TEMPLATE,
        (compact.TEMPLATE,),
        compact.answer_tokens,
        compact.SUBTASK_CHARS,
        offers_tools=False,
    ),
    "worded": Style(
        compact.messages,
        lambda _: compact.TEMPLATE,
        (compact.TEMPLATE,),
        compact.max_worded_tokens,
        compact.SUBTASK_CHARS,
        offers_tools=False,
    ),
    "cards": Style(
        cards.messages,
        lambda _: cards.TEMPLATE,
        (cards.TEMPLATE,),
        cards.answer_tokens,
        cards.SUBTASK_CHARS,
        offers_tools=False,
    ),
}
