"""A question whose answer can be checked: its family, how hard it is, the right answer, and plausible wrong ones."""

from collections.abc import Iterable
from fractions import Fraction
from typing import Literal

from msgspec import Struct

QuestionFamily = Literal[
    "arithmetic",
    "equations",
    "number theory",
    "roman numerals",
    "unit conversion",
    "dates",
    "words",
    "extraction",
    "logic",
]


class SolvedQuestion(Struct, frozen=True):
    """`wrong` holds at least one answer, and none that is `answer`."""

    family: QuestionFamily
    hard: bool
    answer: str
    wrong: tuple[str, ...]


def solved_question(family: QuestionFamily, hard: bool, answer: str, wrong: Iterable[str]) -> SolvedQuestion:
    """Return a question whose wrong answers are really different from the right one, case and spacing aside."""
    different = [name for name in dict.fromkeys(wrong) if name.strip() and plain(name) != plain(answer)]
    return SolvedQuestion(family, hard, answer, tuple(different) or ("unknown",))


def plain(answer: str) -> str:
    """Return an answer without case, spacing and the final stop, to compare it with another."""
    return " ".join(answer.casefold().split()).rstrip(".")


def spell(value: Fraction) -> str:
    """Return a number as people write it: whole, or with the decimals it has, up to six; else rounded to four."""
    if value.denominator == 1:
        return str(value.numerator)
    digits = 6 if (value * 10**6).denominator == 1 else 4
    whole, part = divmod(round(abs(value) * 10**digits), 10**digits)
    decimals = f"{part:0{digits}}".rstrip("0")
    sign = "-" if value < 0 and (whole or part) else ""
    if decimals:
        return f"{sign}{whole}.{decimals}"
    return f"{sign}{whole}"


def wrong_numbers_near(value: Fraction, unit: str = "") -> list[str]:
    """Return numbers that someone who slips might give instead, most plausible first."""
    step = Fraction(1) if abs(value) < 50 or value.denominator != 1 else Fraction(10)
    slips = [value + step, value - step, value + 2, value * 2, value * 10, -value, value + 100, value - 9]
    return [f"{spell(slip)}{unit}" for slip in slips]
