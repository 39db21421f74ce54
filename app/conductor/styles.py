"""The prompts that a model conductor can be asked with, by the name that the pool file has for them.

`general` explains everything in words, for any chat model; `compact` and `worded` are for models that were trained on
it, to write a subtask as one token or word by word. Executor and auditor both take a style from here, so that a
planning request can be made again from its brief.
"""

from collections.abc import Callable, Mapping
from typing import Any

from app.conductor import compact, prompt
from app.conductor.protocol import Brief
from app.core.message.chat import Message
from app.core.plan import parse
from app.core.records import record


@record(frozen=True, slots=True)
class Style:
    """How a brief is put to a model, and what its plan may hold."""

    messages: Callable[[Brief], tuple[Message, ...]]
    template: Callable[[Brief], str]
    """The name of what `messages` makes of a brief: one of `templates`."""
    templates: tuple[str, ...]
    answer_tokens: Callable[[int], int]
    """The most that a plan of so many steps may take."""
    subtask_chars: int
    """The longest subtask."""
    offers_tools: bool
    """Whether a plan says which steps may call the caller's tools; if not, the answering step alone may."""

    def schema(self, brief: Brief, *, positional: bool) -> dict[str, Any]:
        """The schema of a plan for this brief."""
        return parse.schema(
            len(brief.workers) + brief.nests,
            brief.limits.steps,
            self.subtask_chars,
            positional,
            tools=self.offers_tools and bool(brief.task.toolbox.tools),
            further=brief.round > 1,
        )


STYLES: Mapping[str, Style] = {
    "general": Style(
        prompt.messages,
        prompt.template,
        (prompt.TEMPLATE, prompt.FURTHER, prompt.NESTING, prompt.NESTING_FURTHER),
        prompt.answer_tokens,
        prompt.SUBTASK_CHARS,
        offers_tools=True,
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
        compact.worded_tokens,
        compact.SUBTASK_CHARS,
        offers_tools=False,
    ),
}
