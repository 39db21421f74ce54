"""Exact arithmetic on text: a small recursive reader over fractions, with bounds, because the text is anyone's.

Knows + - * / ^ ( ), decimals, thousands separators, implicit products (`3x`, `2(x - 1)`) and one-letter variables.
"""

import re
from collections.abc import Mapping
from fractions import Fraction

TOKEN = re.compile(r"\s*(?:(\d[\d,]*\.?\d*|\.\d+)|([a-z])|(\*\*|[-+*/^()]))")
SPELLED = (
    (r"\bplus\b|\badded to\b", "+"),
    (r"\bminus\b", "-"),
    (r"\btimes\b|\bmultiplied by\b", "*"),
    (r"\bdivided by\b|\bover\b", "/"),
    (r"\bto the power of\b", "^"),
    (r"\bsquared\b", "^2"),
    (r"\bcubed\b", "^3"),
)
MAX_TOKENS, MAX_DEPTH, MAX_EXPONENT, MAX_DIGITS = 120, 20, 12, 18
LARGEST = 10**40


class ExpressionError(ValueError):
    """This text is not an expression that can be worked out here."""


def symbols(text: str) -> str:
    """Return the text in lower case with spelled-out operators as symbols."""
    text = text.lower()
    for words, symbol in SPELLED:
        text = re.sub(words, symbol, text)
    return text


def tokens(text: str) -> list[str]:
    """Return the expression's tokens; raises ExpressionError for anything else."""
    token_list: list[str] = []
    position = 0
    text = text.strip()
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None or len(token_list) >= MAX_TOKENS:
            raise ExpressionError
        token_list.append("^" if match.group().strip() == "**" else match.group().strip())
        position = match.end()
    return token_list


def evaluate(text: str, values: Mapping[str, Fraction] | None = None) -> Fraction:
    """Return the value of the expression; raises ExpressionError."""
    reader = _Reader(tokens(text), values or {})
    result = reader.sum(0)
    if reader.left:
        raise ExpressionError
    return result


class _Reader:
    def __init__(self, token_list: list[str], values: Mapping[str, Fraction]) -> None:
        self._tokens = token_list
        self._values = values
        self._at = 0

    @property
    def left(self) -> bool:
        return self._at < len(self._tokens)

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ExpressionError
        total = self._product(depth)
        while (sign := self._peek()) in {"+", "-"}:
            self._at += 1
            term = self._product(depth)
            total = total + term if sign == "+" else total - term
        return total

    def _product(self, depth: int) -> Fraction:
        total = self._unary(depth)
        while self.left and (token := self._peek()) not in {"+", "-", ")"}:
            if token in {"*", "/"}:
                self._at += 1
            factor = self._unary(depth)
            if token == "/" and factor == 0:
                raise ExpressionError
            total = _check_bounds(total / factor if token == "/" else total * factor)
        return total

    def _unary(self, depth: int) -> Fraction:
        if self._peek() in {"+", "-"}:
            if depth > MAX_DEPTH:
                raise ExpressionError
            sign = self._take()
            value = self._unary(depth + 1)
            return -value if sign == "-" else value
        return self._power(depth)

    def _power(self, depth: int) -> Fraction:
        value = self._atom(depth)
        if self._peek() != "^":
            return value
        self._at += 1
        exponent = self._unary(depth + 1)
        if exponent.denominator != 1 or not 0 <= exponent <= MAX_EXPONENT or abs(value) > 10**MAX_DIGITS:
            raise ExpressionError
        return _check_bounds(value ** int(exponent))

    def _atom(self, depth: int) -> Fraction:
        token = self._take()
        if token == "(":
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise ExpressionError
            return value
        if token in self._values:
            return self._values[token]
        if not token[:1].isdigit() and not token.startswith("."):
            raise ExpressionError
        if len(token) > MAX_DIGITS:
            raise ExpressionError
        return Fraction(token.replace(",", "").rstrip("."))

    def _peek(self) -> str:
        return self._tokens[self._at] if self.left else ""

    def _take(self) -> str:
        token = self._peek()
        self._at += 1
        return token


def _check_bounds(value: Fraction) -> Fraction:
    if abs(value) > LARGEST or value.denominator > LARGEST:
        raise ExpressionError
    return value
