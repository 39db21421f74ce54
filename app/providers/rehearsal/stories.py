"""Arithmetic in words: a small story with numbers, and a question at its end."""

import re
from fractions import Fraction

from app.providers.rehearsal.solved_question import SolvedQuestion, solved_question, spell, wrong_numbers_near

N = r"\$?(\d+(?:\.\d+)?)"
GAIN = "buys|gets|finds|receives|picks|wins|earns|bakes|makes|collects|gains|catches|adds|bought|got|found|received"
LOSS = "eats|gives|loses|sells|spends|uses|breaks|donates|drops|throws|removes|ate|gave|lost|sold|spent|used"
HAVE = "has|have|had|starts with|started with|begins with|owns"
RATE = r"(km|kilometers|kilometres|miles|meters|metres)\s*(?:per|an|a|/|each)\s*(?:hour|h|minute|second)"


def story(text: str) -> SolvedQuestion | None:
    """Return the first reading that fits."""
    line = " ".join(text.lower().split())
    if not re.search(r"\bhow (?:many|much|far|long)\b", line):
        return None
    for reading in (_equal_shares, _price, _speed, _groups, _per_one, _changes):
        result = reading(line)
        if result is not None:
            value, steps, unit = result
            large = any(len(number) > 3 for number in re.findall(r"\d+", line))
            return solved_question(
                "arithmetic", steps > 2 or large, f"{spell(value)}{unit}", wrong_numbers_near(value, unit)
            )
    return None


Reading = tuple[Fraction, int, str]


def _changes(line: str) -> Reading | None:
    """`Anna has 12 apples. She buys 7 more and gives 4 to Ben. How many apples does she have now?`"""
    start = re.search(rf"\b(?:{HAVE}) {N}", line)
    if start is None:
        return None
    value, steps = Fraction(start.group(1)), 0
    for verb, number in re.findall(rf"\b({GAIN}|{LOSS})\b[^.?!\d]{{0,40}}?{N}", line[start.end() :]):
        value += Fraction(number) if re.fullmatch(GAIN, verb) else -Fraction(number)
        steps += 1
    return (value, steps, "") if steps else None


def _groups(line: str) -> Reading | None:
    """`There are 6 boxes with 24 pencils each. How many pencils are there in all?`"""
    joint = r"(?:that )?(?:each )?(?:with|of|holds?|contain|containing|have)"
    match = re.search(rf"\b{N} [a-z]+,? {joint} {N} [a-z]+", line)
    if match is None or not re.search(r"\beach\b|\bevery\b", line):
        return None
    return Fraction(match.group(1)) * Fraction(match.group(2)), 1, ""


def _per_one(line: str) -> Reading | None:
    """`Each box holds 12 eggs. How many eggs are in 7 boxes?`, `A pen costs $3. How much do 14 pens cost?`"""
    verbs = "holds|contains|has|fits|costs|weighs|needs|takes|seats"
    match = re.search(
        rf"\b(?:an?|each|every|one) [a-z]+ (?:{verbs}) {N}\b.*?\bhow (?:many|much)\b.*?\b{N} [a-z]+", line
    )
    if not match:
        return None
    return (Fraction(match.group(1)) * Fraction(match.group(2)), 1, "")


def _price(line: str) -> Reading | None:
    """`If 4 pens cost $6, how much do 10 pens cost?`, `Pens are $3 each. How much do 14 pens cost?`"""
    if match := re.search(rf"\b{N} [a-z]+ costs? {N}.*?how much (?:do|would|will|are) {N}", line):
        count, cost, new_count = map(Fraction, match.groups())
        if not count:
            return None
        return (cost / count * new_count, 2, "")
    match = re.search(
        rf"\b(?:cost|are|is|at|for) {N} (?:dollars |euros )?each\b.*?how much (?:do|would|will|are) {N}", line
    )
    if not match:
        return None
    return (Fraction(match.group(1)) * Fraction(match.group(2)), 1, "")


def _speed(line: str) -> Reading | None:
    """`A train travels 60 km per hour for 3 hours. How far does it go?`"""
    match = re.search(rf"{N}\s*{RATE} for {N} (?:hours?|minutes?|seconds?)\b.*how far", line)
    if match is None:
        return None
    return Fraction(match.group(1)) * Fraction(match.group(3)), 1, f" {match.group(2)}"


def _equal_shares(line: str) -> Reading | None:
    """`24 sweets are shared equally among 6 children. How many does each get?`"""
    match = re.search(rf"\b{N} [a-z]+ (?:[a-z]+ )?(?:shared|divided|split)[^.?\d]{{0,30}}? {N}\b", line)
    if match is None or Fraction(match.group(2)) == 0:
        return None
    return Fraction(match.group(1)) / Fraction(match.group(2)), 1, ""
