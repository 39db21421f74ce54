"""Tasks that are composed of one to three parts, each of a family, in many words; the right answer is computed.

A text does not say how hard its task is: a hidden trait, the same for all workers, is drawn apart from it. Openings and
phrases use words of other domains on purpose. A task may refer to a document, short or long, and may be confidential;
both are said in words too. The document itself is counted and not written out.
"""

import hashlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from functools import cache
from importlib.resources import files
from random import Random
from typing import Any, Literal

from msgspec import Struct

from app.lab.world2.constants import DOMAINS, TRAITS, constants

FROZEN_FAMILIES = "436ba8dd1bd7ceec49919e785c45633305df444b6e993d6ab4e375a8d13da8c1"
"""The SHA-256 of families.toml, committed and tested like that of the constants."""
WORDS = (
    "amber", "basket", "candle", "dragon", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle",
    "lantern", "meadow", "needle", "orchard", "pepper", "quarry", "ribbon", "saddle", "timber", "umbrella", "violet",
    "willow", "zephyr",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MOST_PARTS = 3
SEPARATOR = "; "

Split = Literal["train", "fresh", "phrasings", "families"]
"""The tasks of training; fresh ones of the same kind; in phrasings, or of families, that training never meets."""


class Family(Struct, frozen=True):
    """A kind of part: its domain's place in `DOMAINS`, its difficulty in logits, and the phrases that ask for it."""

    name: str
    domain: int
    difficulty: float
    phrases: tuple[str, ...]
    held_out: bool


class Part(Struct, frozen=True):
    """One part of a task: the right answer, and a wrong one that is plausible."""

    family: Family
    answer: str
    slip: str


class Task(Struct, frozen=True):
    """A task. `document` is a place in `constants.DOCUMENT_TOKENS`, `trait` one in `constants.TRAITS`."""

    text: str
    parts: tuple[Part, ...]
    document: int
    confidential: bool
    trait: int

    @property
    def answer(self) -> str:
        """Return the right answer, which joins those of all parts."""
        return SEPARATOR.join([part.answer for part in self.parts])

    @property
    def domain(self) -> int:
        """Return the domain of most parts, of several the first one's."""
        domains = [part.family.domain for part in self.parts]
        return max(domains, key=domains.count)

    @property
    def kind(self) -> tuple[tuple[str, ...], int, bool]:
        """Return all that the expected reward of a plan depends on, apart from the trait: families, document,
        confidence."""
        families = tuple([part.family.name for part in self.parts])
        return families, self.document, self.confidential


def _slot(a: int, b: int, c: int, w: Sequence[str]) -> Mapping[str, Any]:
    return {"a": a, "b": b, "c": c, "w": ", ".join(w)}


def _date_after(days: int) -> str:
    day = date(2026, 3, 1) + timedelta(days=days)
    return f"{day.day} {day:%B}"


def _clock_time(minutes: int) -> str:
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


@cache
def _answer_rules() -> Mapping[str, Callable[[int, int, int, Sequence[str]], object]]:
    """Return how the right answer is computed, by family."""
    return {
        "total": lambda a, b, c, w: a + b * c,
        "share": lambda a, b, c, w: a * b // c,
        "remainder": lambda a, b, c, w: a * b % c,
        "proportion": lambda a, b, c, w: a * b,
        "weekday": lambda a, b, c, w: WEEKDAYS[a * b % 7],
        "clock": lambda a, b, c, w: _clock_time(b * c),
        "span": lambda a, b, c, w: 7 * a + b,
        "deadline": lambda a, b, c, w: _date_after(a),
        "loop": lambda a, b, c, w: a + b * c,
        "pick": lambda a, b, c, w: w[a % len(w)],
        "binary": lambda a, b, c, w: f"{a * b:b}",
        "recursion": lambda a, b, c, w: c + a * (a + 1) // 2,
        "queue": lambda a, b, c, w: w[a % len(w)],
        "parity": lambda a, b, c, w: "on" if a * b % 2 else "off",
        "truth": lambda a, b, c, w: max(a, b),
        "knots": lambda a, b, c, w: a * (a - 1) // 2,
        "sorting": lambda a, b, c, w: ", ".join(sorted(w)),
        "letters": lambda a, b, c, w: sum(map(len, w)),
        "longest": lambda a, b, c, w: max(w, key=len),
        "backwards": lambda a, b, c, w: w[0][::-1],
    }


@cache
def families() -> tuple[Family, ...]:
    """Return all families."""
    all_families = []
    for name, entry in _entries()["families"].items():
        phrases = tuple(entry["phrases"])
        domain = DOMAINS.index(entry["domain"])
        all_families.append(Family(name, domain, entry["difficulty"], phrases, entry.get("held_out", False)))
    return tuple(all_families)


def draw_task(random: Random, split: Split) -> Task:
    """Draw a task of this split."""
    world = constants()
    count = random.choices((1, 2, 3), world.parts)[0]
    document = random.choices((0, 1, 2), world.documents)[0]
    confidential = random.random() < world.confidential
    parts, sentences = [], []
    for family in _draw_families(random, split, count):
        part, sentence = _draw_part(random, family, split)
        parts.append(part)
        sentences.append(sentence)
    text = _draw_text(random, split, sentences, document, confidential)
    return Task(text, tuple(parts), document, confidential, random.randrange(len(TRAITS)))


def draw_tasks(split: Split, seed: str, count: int) -> list[Task]:
    """Draw so many tasks of a split; the same for the same seed."""
    random = Random(f"world-2|{split}|{seed}")
    return [draw_task(random, split) for _ in range(count)]


def digest() -> str:
    """Return the SHA-256 of families.toml as it is."""
    return hashlib.sha256(_file()).hexdigest()


def _draw_families(random: Random, split: Split, count: int) -> list[Family]:
    """Return the families of the parts; a held-out family takes the place of every part where families are held out."""
    eligible = [family for family in families() if family.held_out is (split == "families")]
    chosen = [random.choice(eligible)]
    of_first_domain = [family for family in eligible if family.domain == chosen[0].domain]
    while len(chosen) < count:
        if random.random() < constants().same_domain:
            chosen.append(random.choice(of_first_domain))
        else:
            chosen.append(random.choice(eligible))
    return chosen


def _draw_part(random: Random, family: Family, split: Split) -> tuple[Part, str]:
    a, b, c = random.randrange(3, 60), random.randrange(3, 60), random.randrange(3, 60)
    while b == a:
        b = random.randrange(3, 60)
    words = random.sample(WORDS, 4)
    answer = str(_answer_rules()[family.name](a, b, c, words))
    phrase = _draw_phrase(random, family.phrases, split)
    return Part(family, answer, _wrong_answer(answer, words)), phrase.format_map(_slot(a, b, c, words))


def _wrong_answer(answer: str, words: Sequence[str]) -> str:
    """Return a wrong answer."""
    if answer.isdecimal():
        return str(int(answer) + 1)
    others = {"on": "off", "off": "on", **dict(zip(WEEKDAYS, (*WEEKDAYS[1:], WEEKDAYS[0]), strict=True))}
    if answer in others:
        return others[answer]
    for word in words:
        if word != answer:
            return word
    return ""


def _draw_text(random: Random, split: Split, sentences: Sequence[str], document: int, confidential: bool) -> str:
    words = _entries()["words"]
    document_words = ("no_document", "short_document", "long_document")[document]
    matter = "open_matter"
    if confidential:
        matter = "confidential_matter"
    text = _draw_phrase(random, words["openings"], split) + " "
    for place, sentence in enumerate(sentences):
        kind = "further"
        if len(sentences) == 1:
            kind = "alone"
        elif place == 0:
            kind = "first"
        joint = _draw_phrase(random, words[kind], split)
        if joint in ("", "Please: "):
            sentence = sentence[0].upper() + sentence[1:]
        text += joint + sentence
    tail = [_draw_phrase(random, words[name], split) for name in (document_words, matter, "closings")]
    random.shuffle(tail)
    return text + "".join(tail)


def _draw_phrase(random: Random, phrases: Sequence[str], split: Split) -> str:
    """Draw one of these phrases: the last one if phrasings are held out, else one of the others."""
    if split == "phrasings":
        return phrases[-1]
    return random.choice(phrases[:-1])


@cache
def _entries() -> Mapping[str, Any]:
    return tomllib.loads(_file().decode())


def _file() -> bytes:
    return files(__package__).joinpath("families.toml").read_bytes()
