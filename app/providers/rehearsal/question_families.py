"""The readers of the questions that rehearsal workers can solve: small families of tasks, each by real computation.

Order matters: the special readings come before the general ones. Long texts are refused before any pattern sees them.
"""

from collections.abc import Callable, Mapping

from app.providers.rehearsal import dates, numbers, stories, words
from app.providers.rehearsal.solved_question import QuestionFamily, SolvedQuestion

MAX_CHARS = 3_000
PLAIN = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": "*",
        "\u00f7": "/",
    }
)

READINGS: tuple[Callable[[str], SolvedQuestion | None], ...] = (
    words.comparison,
    words.syllogism,
    words.letters,
    words.extraction,
    dates.dates,
    numbers.roman,
    numbers.units,
    numbers.theory,
    numbers.equation,
    numbers.expression,
    stories.story,
)

PLANS: Mapping[QuestionFamily, str] = {
    "arithmetic": "write down every quantity; apply each change in order; check the result backwards",
    "equations": "bring the unknowns to one side; divide by the coefficient; put the result back in to check it",
    "number theory": "split the numbers into prime factors; combine the factors; test the result by division",
    "roman numerals": "go from the largest symbol to the smallest; mind the subtractive pairs; read the result back",
    "unit conversion": "write down the factor between the units; multiply; check the order of magnitude",
    "dates": "count the days month by month; mind leap years; check with the weekday",
    "words": "list the items one by one; apply the operation to each; go through the list once more",
    "extraction": "read the text from left to right; mark each match; copy the matches exactly",
    "logic": "write down each fact as an arrow; chain the arrows; read off what is asked",
}
"""The plan that a worker writes when it is asked for one, by the family of the question. The message for questions
that no rehearsal worker can solve lists these families."""


def solve(text: str) -> SolvedQuestion | None:
    """Return the question in this text with its answer, or None if it belongs to no family."""
    text = text.strip().translate(PLAIN)
    if len(text) > MAX_CHARS:
        return None
    for reading in READINGS:
        solved = reading(text)
        if solved is not None:
            return solved
    return None
