"""Texts that match a regular expression, made from its parts as Python's own parser reads them."""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from re import _parser  # type: ignore[attr-defined]
from string import ascii_letters, digits
from typing import Any, Final

VARIANTS: Final = 16
"""How many texts are made from one expression. Each takes other characters and alternatives, and repeats more often."""
MOST_CHARACTERS: Final = 20_000
CHARACTERS: Final = digits[1:] + digits[0] + ascii_letters + " -_.,:/@#+!'"
"""The characters that are tried where an expression allows several, the most usual ones first."""
CATEGORIES: Final[Mapping[str, Callable[[str], bool]]] = {
    "DIGIT": str.isdigit,
    "SPACE": str.isspace,
    "WORD": lambda character: character.isalnum() or character == "_",
}
NAMED_GROUP: Final = re.compile(r"\(\?<(?![=!])")
"""The beginning of a named group as ECMA-262 writes it, whose expressions JSON schemas have."""

Parts = Any
"""A parsed expression, as Python's own parser returns it: a sequence of pairs, such as `(LITERAL, 97)` for the letter
a. The first of a pair names an operation; the second is its argument, which may contain parsed expressions in turn."""


def matching_texts(pattern: str, least: int) -> Iterator[str]:
    """Yield texts that the expression probably matches: short ones first, then one whose parts are repeated `least`
    times. Yields nothing if Python cannot parse the expression.

    Anchors are ignored, and the text of a lookahead is written out in half of the texts, so the caller checks each one.
    """
    try:
        parts = _parser.parse(NAMED_GROUP.sub("(?P<", pattern))
    except (re.error, OverflowError):
        return
    for writes_ahead, variant in product((False, True), (*range(VARIANTS), least)):
        try:
            yield _Writer(variant, writes_ahead=writes_ahead).write(parts)
        except ValueError:
            continue


class _Writer:
    """Writes one text that matches an expression."""

    def __init__(self, variant: int, *, writes_ahead: bool) -> None:
        self._variant = variant
        self._writes_ahead = writes_ahead
        self._groups: dict[int, str] = {}

    def write(self, parts: Parts) -> str:
        """Return a text for these parts. Raises ValueError where there is none, or where it would be too long."""
        text = ""
        for operation, argument in parts:
            text += self._part(str(operation), argument)
            if len(text) > MOST_CHARACTERS:
                raise ValueError
        return text

    def _part(self, operation: str, argument: Any) -> str:
        match operation:
            case "LITERAL":
                return chr(argument)
            case "IN":
                return self._one_of(argument)
            case "NOT_LITERAL" | "ANY":
                excluded = ord("\n") if argument is None else argument
                return self._one_of([("NEGATE", None), ("LITERAL", excluded)])
            case "BRANCH":
                branches = argument[1]
                return self.write(branches[self._variant % len(branches)])
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, parts = argument
                return self._repeated(min(max(low, self._variant), high), parts)
            case "SUBPATTERN":
                group, _, _, parts = argument
                self._groups[group] = self.write(parts)
                return self._groups[group]
            case "GROUPREF":
                return self._groups.get(argument, "")
            case "ASSERT" if self._writes_ahead and argument[0] > 0:
                return self.write(argument[1])
            case "AT" | "ASSERT" | "ASSERT_NOT":
                return ""
        raise ValueError(operation)

    def _repeated(self, count: int, parts: Parts) -> str:
        if count > MOST_CHARACTERS:
            raise ValueError
        return self.write(part for _ in range(count) for part in parts)

    def _one_of(self, members: Parts) -> str:
        """Return one of the characters of a set."""
        members = [(str(operation), argument) for operation, argument in members]
        is_negated = members[0][0] == "NEGATE"
        candidates = list(CHARACTERS)
        for operation, argument in members:
            if operation in ("LITERAL", "RANGE"):
                candidates.append(chr(argument if operation == "LITERAL" else argument[0]))
        choices = [character for character in candidates if _is_member(character, members) != is_negated]
        if not choices:
            raise ValueError
        return choices[self._variant % len(choices)]


def _is_member(character: str, members: Parts) -> bool:
    """Return whether a set names the character, be it negated or not."""
    for operation, argument in members:
        if operation == "LITERAL" and ord(character) == argument:
            return True
        if operation == "RANGE" and argument[0] <= ord(character) <= argument[1]:
            return True
        if operation == "CATEGORY":
            name = str(argument).removeprefix("CATEGORY_")
            if CATEGORIES[name.removeprefix("NOT_")](character) != name.startswith("NOT_"):
                return True
    return False
