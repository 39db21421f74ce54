"""Questions about numbers: arithmetic, equations, number theory, Roman numerals, units."""

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from app.providers.rehearsal.expression import ExpressionError, evaluate, symbols, tokens
from app.providers.rehearsal.solved_question import SolvedQuestion, solved_question, spell, wrong_numbers_near

ASK = r"(?:what(?:'s| is| are)|how much is|compute|calculate|evaluate|work out|find)"
ROMAN = ((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"))
ROMAN_SMALL = ((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))
SCALES = {"c": "celsius", "f": "fahrenheit", "k": "kelvin"}
TEMPERATURES = frozenset(SCALES.values())
ZERO_CELSIUS = Fraction("273.15")
"""The freezing point of water in kelvin."""
UNITS: dict[str, tuple[str, Fraction]] = {
    name: (kind, Fraction(factor))
    for kind, table in {
        "length": "mm 0.001 millimeter 0.001 cm 0.01 centimeter 0.01 m 1 meter 1 km 1000 kilometer 1000 "
        "inch 0.0254 inche 0.0254 foot 0.3048 feet 0.3048 ft 0.3048 yard 0.9144 mile 1609.344",
        "mass": "mg 0.000001 milligram 0.000001 g 0.001 gram 0.001 kg 1 kilogram 1 ton 1000 tonne 1000 "
        "ounce 0.028349523125 oz 0.028349523125 pound 0.45359237 lb 0.45359237",
        "volume": "ml 0.001 milliliter 0.001 cl 0.01 l 1 liter 1 gallon 3.785411784 quart 0.946352946 pint 0.473176473",
        "time": "second 1 minute 60 hour 3600 day 86400 week 604800",
        "data": "byte 1 kilobyte 1000 megabyte 1000000 gigabyte 1000000000",
    }.items()
    for name, factor in zip(table.split()[::2], table.split()[1::2], strict=True)
}


def expression(text: str) -> SolvedQuestion | None:
    """`What is 17 * 23?`, `Compute (3 + 4) * 5`, `What is 15% of 80?`"""
    match = re.search(rf"\b{ASK}\b:?\s+(?:the (?:sum|value|result) of\s+)?(.+)", symbols(text))
    body = re.split(r"[?=\n]|\.\s|\.$", match.group(1) if match else symbols(text), maxsplit=1)[0].strip()
    body = re.sub(r"(\d+(?:\.\d+)?)\s*(?:%|percent) of", r"\1/100*", body)
    if "the sum of" in text.lower():
        body = re.sub(r",\s*(?:and\s+)?|\s+and\s+", "+", body)
    try:
        token_list = tokens(body)
        value = evaluate(body)
    except ExpressionError:
        return None
    signs = sum(token in "+-*/^" for token in token_list)
    if not signs:
        return None
    large = any(len(token.replace(",", "")) > 3 for token in token_list if token[0].isdigit())
    return solved_question(
        "arithmetic", signs > 2 or large or "^" in token_list, spell(value), wrong_numbers_near(value)
    )


def equation(text: str) -> SolvedQuestion | None:
    """`Solve 3x + 5 = 20`, `x + y = 10 and x - y = 2`: linear, in one or two unknowns."""
    line = symbols(text)
    try:
        solution = solve_linear_equations(line)
    except ExpressionError:
        return None
    first, mentions = next(iter(solution)), _sides(line)[0]
    hard = len(solution) > 1 or sum(side.count(first) for side in mentions) > 1 or "(" in line
    answer, *wrong = [_spell_values(values) for values in (solution, *_wrong_solutions(solution))]
    return solved_question("equations", hard, answer, wrong)


def solve_linear_equations(line: str) -> dict[str, Fraction]:
    """Solve the one or two linear equations in a line. Returns each unknown's value by its name; raises ExpressionError
    if there is not exactly one solution."""
    sides = _sides(line)
    names = sorted({letter for pair in sides for side in pair for letter in re.findall(r"[a-z]", side)})
    if not sides or len(sides) != len(names) or len(names) > 2:
        raise ExpressionError
    solution = _solve_rows([_row(left, right, names) for left, right in sides])
    if solution is None:
        raise ExpressionError
    return dict(zip(names, solution, strict=True))


def _sides(line: str) -> list[tuple[str, str]]:
    """Return the left and right side of each equation in a line."""
    return re.findall(r"([-+*/^().\d\sxyzn]*[xyzn\d)]\s*)=\s*([-+*/^().\d\sxyzn]*[xyzn\d)])", line)


def _spell_values(values: Mapping[str, Fraction]) -> str:
    return " and ".join(f"{name} = {value!s}" for name, value in values.items())


def _wrong_solutions(solution: Mapping[str, Fraction]) -> list[dict[str, Fraction]]:
    """Return solutions that somebody who slips might give."""
    offsets = (Fraction(1), Fraction(-1), Fraction(2), Fraction(1, 2))
    slips = []
    for offset in offsets:
        slips.append({name: value + offset for name, value in solution.items()})
    slips.append({name: -value for name, value in solution.items()})
    return slips


def _row(left: str, right: str, names: list[str]) -> list[Fraction]:
    """Return the equation as coefficients and a constant: a*x + b*y + c = 0. Checked at one more point to be linear."""

    def at(*point: int) -> Fraction:
        values = dict(zip(names, map(Fraction, point), strict=True))
        return evaluate(left, values) - evaluate(right, values)

    zero = at(*[0] * len(names))
    slopes = []
    for place in range(len(names)):
        point = [0] * len(names)
        point[place] = 1
        slopes.append(at(*point) - zero)
    if at(*[3] * len(names)) != zero + 3 * sum(slopes):
        raise ExpressionError
    return [*slopes, zero]


def _solve_rows(rows: list[list[Fraction]]) -> list[Fraction] | None:
    if len(rows) == 1:
        ((slope, constant),) = rows
        return [-constant / slope] if slope else None
    (a, b, c), (d, e, f) = rows
    determinant = a * e - b * d
    if not determinant:
        return None
    return [(b * f - c * e) / determinant, (c * d - a * f) / determinant]


def theory(text: str) -> SolvedQuestion | None:
    """Divisors, primes, remainders, factorials, digit sums."""
    line = text.lower()
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", line)]
    if not numbers or len(numbers) > 4 or max(numbers) > 10**9:
        return None
    first = numbers[0]
    hard = max(numbers) > 200
    if len(numbers) > 1 and re.search(
        r"greatest common (?:divisor|factor)|highest common factor|\bgcd\b|\bhcf\b", line
    ):
        return _number(math.gcd(*numbers), hard)
    if len(numbers) > 1 and re.search(r"(?:least|lowest|smallest) common multiple|\blcm\b", line):
        return _number(math.lcm(*numbers), hard)
    if len(numbers) == 2 and numbers[1] and re.search(r"remainder|\bmod(?:ulo)?\b", line):
        return _number(first % numbers[1], hard)
    if len(numbers) != 1:
        return None
    return _single(line, first, hard)


def _single(line: str, number: int, hard: bool) -> SolvedQuestion | None:
    if number <= 10**6 and re.search(r"next prime|prime (?:number )?(?:after|above|greater)", line):
        return _number(_next_prime(number), hard)
    if re.search(r"prime factor", line):
        return _factorise(number, hard)
    if re.search(r"\bprime\b", line):
        right, other = ("yes", "no") if _is_prime(number) else ("no", "yes")
        return solved_question("number theory", hard, right, [other])
    if re.search(r"sum of (?:the|its|all) digits|digit sum", line):
        return _number(sum(map(int, str(number))), len(str(number)) > 4)
    if number <= 20 and re.search(r"factorial|\d!", line):
        return _number(math.factorial(number), number > 6)
    if re.search(r"how many divisors", line) and 0 < number <= 10**5:
        return _number(sum(number % n == 0 for n in range(1, number + 1)), hard)
    return None


def _number(value: int, hard: bool) -> SolvedQuestion:
    return solved_question("number theory", hard, str(value), wrong_numbers_near(Fraction(value)))


def _factorise(number: int, hard: bool) -> SolvedQuestion | None:
    factors: list[int] = []
    rest, factor = number, 2
    while factor * factor <= rest:
        while rest % factor == 0:
            factors.append(factor)
            rest //= factor
        factor += 1
    if rest > 1:
        factors.append(rest)
    if not factors:
        return None
    slips = [[*factors[:-1], factors[-1] + 2], [2, *factors], [*factors, 3], factors[1:]]
    wrong = [" * ".join(map(str, sorted(slip))) for slip in slips]
    return solved_question("number theory", hard, " * ".join(map(str, factors)), wrong)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, math.isqrt(number) + 1))


def _next_prime(number: int) -> int:
    candidate = number + 1
    while not _is_prime(candidate):
        candidate += 1
    return candidate


def roman(text: str) -> SolvedQuestion | None:
    """Both ways: `Write 1994 in Roman numerals`, `What number is MCMXCIV?`"""
    digits = re.search(r"\b(\d{1,4})\b", text)
    if digits and re.search(r"roman", text, re.IGNORECASE) and 0 < int(digits.group(1)) < 4000:
        number = int(digits.group(1))
        near_by = [_roman(n) for n in (number + 1, number - 1, number + 10, number + 100) if 0 < n < 4000]
        return solved_question("roman numerals", number > 100, _roman(number), near_by)
    numeral = re.search(r"\b(?=[MDCLXVI]{2,})(M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3}))\b", text)
    if numeral and re.search(r"roman|number|value|arabic|decimal|digits", text, re.IGNORECASE):
        number = next((n for n in range(1, 4000) if _roman(n) == numeral.group(1)), 0)
        if not number:
            return None
        return solved_question("roman numerals", number > 100, str(number), wrong_numbers_near(Fraction(number)))
    return None


def _roman(number: int) -> str:
    text = ""
    for value, letters in (*ROMAN, *ROMAN_SMALL):
        text += letters * (number // value)
        number %= value
    return text


def units(text: str) -> SolvedQuestion | None:
    """`Convert 5 km to miles`, `How many centimeters are in 3.5 meters?`, `Convert 20 Celsius to Fahrenheit`"""
    line = text.lower().replace("metre", "meter").replace("litre", "liter")
    forms = (
        r"(?:convert|what is|change)\s+(-?[\d,.]*\d)\s*(?:degrees? |°\s*)?([a-z]+)\s+"
        r"(?:to|into|in)\s+(?:degrees? )?([a-z]+)",
        r"how many (?P<to>[a-z]+) (?:are|is) (?:there )?in (?P<n>[\d,.]*\d)\s*(?P<of>[a-z]+)",
    )
    if match := re.search(forms[0], line):
        amount, source, target = match.groups()
    elif match := re.search(forms[1], line):
        amount, source, target = match.group("n", "of", "to")
    else:
        return None
    try:
        return _convert(Fraction(amount.replace(",", "")), source, target)
    except ValueError:
        return None


def _convert(amount: Fraction, source: str, target: str) -> SolvedQuestion | None:
    source_scale, target_scale = SCALES.get(source, source), SCALES.get(target, target)
    if {source_scale, target_scale} <= TEMPERATURES and source_scale != target_scale:
        value = _convert_temperature(amount, source_scale, target_scale)
        return solved_question(
            "unit conversion",
            value.denominator != 1,
            f"{spell(value)} {target}",
            wrong_numbers_near(value, f" {target}"),
        )
    source_unit, target_unit = _unit(source), _unit(target)
    if source_unit is None or target_unit is None or source_unit[0] != target_unit[0]:
        return None
    value = amount * source_unit[1] / target_unit[1]
    slips = [value * 10, value / 10, value * 100, amount * target_unit[1] / source_unit[1], value + 1]
    hard = amount.denominator != 1 or (value.denominator != 1 and amount > 100)
    return solved_question(
        "unit conversion", hard, f"{spell(value)} {target}", [f"{spell(slip)} {target}" for slip in slips]
    )


def _unit(name: str) -> tuple[str, Fraction] | None:
    """Return the kind and the factor of a unit, whose name may be a plural."""
    return UNITS.get(name) or UNITS.get(name.removesuffix("s"))


def _convert_temperature(amount: Fraction, source: str, target: str) -> Fraction:
    kelvin = amount
    if source == "celsius":
        kelvin = amount + ZERO_CELSIUS
    elif source == "fahrenheit":
        kelvin = (amount - 32) * 5 / 9 + ZERO_CELSIUS
    if target == "celsius":
        return kelvin - ZERO_CELSIUS
    if target == "fahrenheit":
        return (kelvin - ZERO_CELSIUS) * 9 / 5 + 32
    return kelvin
