"""A conductor that asks a model: a prompt, a JSON schema for constrained decoding, and a plan that is read as it
streams.

Any OpenAI-compatible server can conduct (D8). With constrained decoding every plan is valid by construction; without it
the same reader rejects an invalid plan and gives all reasons.
"""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from app.conductor.prompt import ALTERNATIVES
from app.conductor.protocol import Ask, Brief, Question, Rationale
from app.conductor.styles import Style
from app.core.message.chat import ChosenToken, Piece, TextDelta
from app.core.plan import proposals
from app.core.plan.workflow import CONDUCTOR, Step

LABEL = '"worker"'
"""The field of a plan behind which a worker's ordinal stands."""


class ModelConductor:
    """Asks the worker `worker` of the pool file for a plan."""

    instant = False

    def __init__(self, worker: str, style: Style, *, positional: bool, logprobs: bool, temperature: float) -> None:
        """`positional` and `logprobs` are the abilities of the worker's server."""
        self._worker = worker
        self._style = style
        self._positional = positional
        self._alternatives = 0
        if logprobs:
            self._alternatives = ALTERNATIVES
        self._temperature = temperature

    async def propose(self, brief: Brief, ask: Ask) -> AsyncIterator[Step | Rationale]:
        """Yield each step as its JSON object closes, and at the end the reason for the plan's shape. Raises
        `PlanRejected` with every reason if the text is no plan."""
        names = [worker.name for worker in brief.workers]
        if brief.nests:
            names.append(CONDUCTOR)
        reasoned = self._style.gives_reasons and brief.reasons
        reader = proposals.PlanReader(
            proposals.by_ordinal(names), brief.limits.steps, further=brief.round > 1, reasoned=reasoned
        )
        probabilities = WorkerProbabilities()
        question = Question(
            self._worker,
            self._style.messages(brief),
            max_tokens=self._style.most_tokens(brief),
            schema=self._style.schema(brief, positional=self._positional),
            temperature=self._temperature,
            logprobs=self._alternatives,
            template=self._style.template(brief),
        )
        async with aclosing(ask(question)) as answer:  # whatever ends the reading of it ends the call
            async for pieces in answer:
                probabilities.add(pieces)
                words = [piece.text for piece in pieces if isinstance(piece, TextDelta)]
                for step in reader.feed("".join(words)):
                    yield replace(step, probability=probabilities.next_probability(names.index(step.worker)))
        for step in reader.finish():
            yield step
        if reader.why:
            yield Rationale(reader.why)


class WorkerProbabilities:
    """Finds the probability of each worker choice among the decoded tokens.

    The choice is the digits after `"worker":`. vLLM reports log-probabilities after the grammar's mask, so they sum to
    one over the legal ordinals; the product over the digits' tokens is the choice's probability at temperature 1.
    Servers list the tokens of the model's thoughts, too, which may hold drafts of the plan: its own opening is the
    last one.
    """

    def __init__(self) -> None:
        self._text = ""
        self._tokens: list[tuple[int, str, float]] = []
        self._at = 0

    def add(self, pieces: Sequence[Piece]) -> None:
        """Add the pieces of one read."""
        for piece in pieces:
            if isinstance(piece, ChosenToken):
                self._tokens.append((len(self._text), piece.token, piece.logprob))
                self._text += piece.token

    def next_probability(self, ordinal: int) -> float | None:
        """Return the probability of the next worker choice, `ordinal`; None if the decoder reported none."""
        digits = str(ordinal)
        if not self._at:
            for opening in proposals.START.finditer(self._text):
                self._at = opening.end()
        label = self._text.find(LABEL, self._at)
        if label < 0:
            return None
        start = self._text.find(digits, label + len(LABEL))
        if start < 0:
            return None
        self._at = end = start + len(digits)
        logs = [log for at, token, log in self._tokens if at < end and at + len(token) > start]
        if not logs:
            return None
        return round(math.exp(sum(logs)), 6)
