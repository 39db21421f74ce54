"""Tasks about words: how they are drawn, and how they are worked out from their text."""

import re
from random import Random

from app.providers.rehearsal.worked_task import Slots, WorkedTask

WORDS = tuple(
    re.findall(
        "[a-z]+",
        "apple badge candle desert eagle fabric garden hammer island jacket kettle ladder magnet needle orange pepper "
        "quarry ribbon saddle tunnel umbrella valley window yellow zebra anchor button castle dragon engine forest "
        "guitar helmet insect jungle kitten lemon mirror napkin otter pencil rocket silver turtle velvet walnut "
        "basket copper dancer elbow falcon goblet harbor iron jelly lantern meadow nugget oyster planet",
    )
)
LIST = r"[a-z]+(?:, [a-z]+)*"
SIZES = ((3, 4), (6, 7), (9, 11))


def draw_list(random: Random, level: int) -> Slots:
    """Return a few words, or many; neither sorted nor the same from both ends."""
    words = random.sample(WORDS, random.randint(*SIZES[level]))
    return {"w": ", ".join(words if words != sorted(words) else words[::-1])}


def draw_count(random: Random, level: int) -> Slots:
    """Return a letter, and words."""
    return {"l": random.choice("aeilnort"), **draw_list(random, level)}


def sort(slots: Slots) -> WorkedTask:
    """Return the words in alphabetical order."""
    words = sorted(slots["w"].split(", "))
    return ", ".join(words), ", ".join(_swap_last_two(words)), _level(words)


def reverse(slots: Slots) -> WorkedTask:
    """Return the words from last to first."""
    words = slots["w"].split(", ")[::-1]
    return ", ".join(words), ", ".join(_swap_last_two(words)), _level(words)


def count(slots: Slots) -> WorkedTask:
    """Return the number of times that the letter occurs."""
    result = slots["w"].count(slots["l"])
    return str(result), str(result + 1), _level(slots["w"].split(", "))


def _swap_last_two(words: list[str]) -> list[str]:
    """Return the last two the wrong way round; ValueError where nobody would notice."""
    if len(words) < 2 or words[-1] == words[-2]:
        raise ValueError
    return [*words[:-2], words[-1], words[-2]]


def _level(words: list[str]) -> int:
    return next((level for level, (_, most) in enumerate(SIZES[:-1]) if len(words) <= most), len(SIZES) - 1)
