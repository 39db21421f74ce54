"""Tasks about numbers and equations: how they are drawn, and how they are worked out from their text."""

import math
import re
from random import Random

from app.providers.rehearsal.expression import evaluate
from app.providers.rehearsal.numbers import solve_linear_equations
from app.providers.rehearsal.worked_task import Slots, WorkedTask

NUMBER = r"\d{1,5}"
STEP = re.compile(r"multiply it by (\d+)|add (\d+)|subtract (\d+)")


def draw_sum(random: Random, level: int) -> Slots:
    """Draw a few small numbers, or many larger ones."""
    terms = ((2, 3), (4, 5), (6, 7))[level]
    most = (99, 99, 999)[level]
    count = random.randint(*terms)
    signs = [random.choice("++-*" if place < 2 else "+-") for place in range(count - 1)]
    parts = [str(random.randint(2, most))]
    for sign in signs:
        parts += [sign, str(random.randint(2, most))]
    return {"e": " ".join(parts)}


def sum_of(slots: Slots) -> WorkedTask:
    """Compute products before sums."""
    signs = len(slots["e"].split()) // 2
    total = evaluate(slots["e"])
    return str(total), str(total + 10), _level(signs, 2, 4)


def draw_pair(random: Random, level: int) -> Slots:
    """Draw two numbers of one, three or five digits, with a common factor."""
    low, high = ((10, 99), (200, 999), (20_000, 99_999))[level]
    factor = random.randint(2, 9)
    first, second = (random.randint(-(-low // factor), high // factor) * factor for _ in range(2))
    return {"a": str(max(first, second)), "b": str(min(first, second))}


def _digits(slots: Slots) -> int:
    return _level(max(len(slots["a"]), len(slots["b"])), 2, 3)


def divisor(slots: Slots) -> WorkedTask:
    """Return the greatest common divisor."""
    result = math.gcd(int(slots["a"]), int(slots["b"]))
    return str(result), str(result + 1), _digits(slots)


def remainder(slots: Slots) -> WorkedTask:
    """Return the remainder; ValueError for a division by zero."""
    if not int(slots["b"]):
        raise ValueError
    result = int(slots["a"]) % int(slots["b"])
    return str(result), str(result + 1), _digits(slots)


def draw_equation(random: Random, level: int) -> Slots:
    """Return one line, a bracket, or two unknowns; x is a whole number."""
    a, b, x, y = (random.randint(2, 9) for _ in range(4))
    if level == 0:
        return {"q": f"{a}x + {b} = {a * x + b}"}
    if level == 1:
        a += 9
        c = random.randint(2, 8)
        return {"q": f"{a}(x + {b}) = {c}x + {(a - c) * x + a * b}"}
    times = random.randint(1, 3)
    d, e = times * b + 1, times * a
    return {"q": f"{a}x + {b}y = {a * x + b * y} and {e}x + {d}y = {e * x + d * y}"}


def equation(slots: Slots) -> WorkedTask:
    """Return the whole number x; ValueError where there is none."""
    result = solve_linear_equations(slots["q"]).get("x")
    if result is None or result.denominator != 1:
        raise ValueError
    level = 2 if " and " in slots["q"] else int("(" in slots["q"])
    return str(result), str(result - 1), level


def draw_chain(random: Random, level: int) -> Slots:
    """Return one or two changes, or up to five, of an unknown number."""
    value = random.randint(2, 20)
    steps = []
    for _ in range(random.randint(*((1, 2), (3, 3), (4, 5))[level])):
        by = random.randint(2, 9)
        verb = random.choice(("multiply it by", "add", "subtract"))
        if verb == "add":
            value += by
        elif verb == "subtract":
            value -= by
        else:
            value *= by
        steps.append(f"{verb} {by}")
    return {"s": ", ".join(steps), "c": str(value)}


def chain(slots: Slots) -> WorkedTask:
    """Compute back from the result. Raises ValueError where that leads to no whole number."""
    value, steps = int(slots["c"]), slots["s"].split(", ")
    for step in reversed(steps):
        match = STEP.fullmatch(step)
        if match is None:
            raise ValueError
        factor, added, subtracted = match.groups()
        if added is not None:
            value -= int(added)
        elif subtracted is not None:
            value += int(subtracted)
        elif not int(factor) or value % int(factor):
            raise ValueError
        else:
            value //= int(factor)
    return str(value), str(value + 2), _level(len(steps), 2, 3)


def draw_neighbours(random: Random, level: int) -> Slots:
    """Draw three, five or nine whole numbers in a row."""
    count, start = (3, 5, 9)[level], random.randint(2, 60)
    return {"n": str(count), "t": str(count * start + count * (count - 1) // 2)}


def neighbours(slots: Slots) -> WorkedTask:
    """Return the smallest; ValueError where there is none."""
    count, total = int(slots["n"]), int(slots["t"])
    rest = total - count * (count - 1) // 2
    if count < 2 or rest % count:
        raise ValueError
    result = rest // count
    return str(result), str(result + 1), _level(count, 3, 5)


def _level(size: int, easy: int, medium: int) -> int:
    """Return the level of a task of this size: easy or medium up to these sizes, else hard."""
    if size <= easy:
        return 0
    return 1 if size <= medium else 2
