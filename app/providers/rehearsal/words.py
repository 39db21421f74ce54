"""Questions about words: sorting, counting, reversing, extracting, and small puzzles of comparison."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from app.providers.rehearsal.solved_question import SolvedQuestion, solved_question, wrong_numbers_near

QUOTED = r"[\"']([^\"']{1,400})[\"']"
PATTERNS = {
    "email": r"[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64}){1,4}",
    "url": r"https?://[^\s<>\"']{1,300}[^\s<>\"'.,;:!?)]",
    "hashtag": r"#\w+",
    "price": r"[$€£]\s?\d[\d,]*(?:\.\d+)?",
    "year": r"\b(?:1[5-9]|20)\d\d\b",
    "number": r"-?\b\d[\d,]*(?:\.\d+)?\b",
}
SUPERLATIVES = {
    "tall": ("tall", 1), "short": ("tall", -1), "old": ("old", 1), "young": ("old", -1), "fast": ("fast", 1),
    "slow": ("fast", -1), "heav": ("heavy", 1), "light": ("heavy", -1), "rich": ("rich", 1), "poor": ("rich", -1),
    "strong": ("strong", 1), "weak": ("strong", -1), "big": ("big", 1), "small": ("big", -1),
}  # fmt: skip
STEM = "|".join(SUPERLATIVES)


def letters(text: str) -> SolvedQuestion | None:
    """Sorting, counting and reversing words, letters and lists of numbers."""
    for reading in (_sorting, _counting, _reversal, _superlative):
        if (result := reading(text)) is not None:
            return result
    return None


def _sorting(text: str) -> SolvedQuestion | None:
    start = r"[^:]*:" if ":" in text else r".*?\b(?:words|numbers|names|list)\b"
    match = re.search(rf"\b(?:sort|order|arrange|put)\b{start}(.+)", text, re.IGNORECASE | re.DOTALL)
    if match is None:
        return None
    down = bool(re.search(r"descending|reverse|largest (?:to|first)|z to a|decreasing", text, re.IGNORECASE))
    tail = re.split(
        r"\b(?:in|from|by) (?:ascending|descending|alphabetical|increasing|decreasing|reverse|small|large)",
        match.group(1),
    )[0]
    items = [item.strip(" .\"'") for item in re.split(r"[,;\n]|\band\b", tail) if item.strip(" .\"'")]
    if not 2 <= len(items) <= 60:
        return None
    numeric = all(re.fullmatch(r"-?\d+(?:\.\d+)?", item) for item in items)
    key: Callable[[str], object] = Fraction if numeric else str.casefold
    right = sorted(items, key=key, reverse=down)  # type: ignore[arg-type]
    return solved_question("words", len(items) > 5, ", ".join(right), _shuffles(right))


def _shuffles(right: Sequence[str]) -> list[str]:
    swaps = [[*right[:n], right[n + 1], right[n], *right[n + 2 :]] for n in range(len(right) - 1)]
    return [", ".join(items) for items in [*reversed(swaps), list(reversed(right))]]


def _counting(text: str) -> SolvedQuestion | None:
    ask = re.search(r"how (?:many|often|many times)", text, re.IGNORECASE)
    if ask is None:
        return None
    letter = re.search(
        r"how many (?:times does )?(?:the letters? |letters? |times the letter )?[\"']?([a-z])[\"']?(?:'?s)?"
        r"(?: letters?)? (?:are|is|appears?|occurs?)?\s*(?:there )?in (?:the )?(?:words? )?[\"']?([\w-]{2,60})",
        text, re.IGNORECASE,
    )  # fmt: skip
    if letter:
        count = letter.group(2).lower().count(letter.group(1).lower())
        return _number(count, len(letter.group(2)) > 12)
    quoted = re.search(QUOTED, text) or re.search(r":\s*(.{1,2000})$", text.strip(), re.DOTALL)
    word = re.search(r"in (?:the )?(?:word )?[\"']?([\w-]{2,60})[\"']?\s*\??$", text.strip())
    match = quoted or word
    if match is None:
        return None
    body = match.group(1)
    if re.search(r"how many vowels", text, re.IGNORECASE):
        return _number(len(re.findall(r"[aeiou]", body, re.IGNORECASE)), len(body) > 12)
    if re.search(r"how many (?:letters|characters)", text, re.IGNORECASE):
        return _number(len(re.findall(r"\w", body)), len(body) > 12)
    if re.search(r"how many words", text, re.IGNORECASE):
        return _number(len(body.split()), len(body.split()) > 12)
    return None


def _number(count: int, hard: bool) -> SolvedQuestion:
    wrong = [answer for answer in wrong_numbers_near(Fraction(count)) if not answer.startswith("-")]
    return solved_question("words", hard, str(count), wrong)


def _reversal(text: str) -> SolvedQuestion | None:
    match = re.search(r"\b(?:reverse|backwards|spell)\b", text, re.IGNORECASE)
    quoted = (
        re.search(QUOTED, text)
        or re.search(r"\bwords?:? ([\w-]{2,60})", text)
        or re.search(r":\s*([\w ]{2,200})$", text.strip())
    )
    if match is None or quoted is None:
        return None
    body = quoted.group(1).strip()
    if re.search(r"(?:order of the words|word order)", text, re.IGNORECASE):
        right = " ".join(reversed(body.split()))
        return solved_question("words", len(body.split()) > 5, right, [body, " ".join(sorted(body.split()))])
    right = body[::-1]
    swaps = [right[:n] + right[n + 1] + right[n] + right[n + 2 :] for n in range(len(right) - 1)]
    return solved_question("words", len(body) > 10, right, [*reversed(swaps), right[1:], body])


def _superlative(text: str) -> SolvedQuestion | None:
    match = re.search(
        r"\b(longest|shortest|largest|smallest|biggest|highest|lowest) (?:word|number)s?[^:]*:\s*(.{1,2000})",
        text,
        re.IGNORECASE | re.DOTALL,
    )
    if match is None:
        return None
    items = [item.strip(" .?\"'") for item in re.split(r"[,;\s]+|\band\b", match.group(2)) if item.strip(" .?\"'")]
    words = match.group(1).lower() in {"longest", "shortest"}
    if not words and not all(re.fullmatch(r"-?\d+(?:\.\d+)?", item) for item in items):
        return None
    size: Callable[[str], Fraction] = (lambda item: Fraction(len(item))) if words else Fraction
    pick = min
    if match.group(1).lower() in {"longest", "largest", "biggest", "highest"}:
        pick = max
    if len(items) > 1:
        return solved_question("words", len(items) > 6, pick(items, key=size), items)
    return None


def extraction(text: str) -> SolvedQuestion | None:
    """`Extract the email addresses from: ...`; also URLs, hashtags, prices, years, numbers."""
    match = re.search(
        r"\b(?:extract|find|list|give me|copy)\b[^:\n]{0,60}?\b(e-?mail|url|link|hashtag|price|year|number)"
        r"[^:\n]{0,60}:\s*(.+)", text, re.IGNORECASE | re.DOTALL,
    )  # fmt: skip
    if match is None:
        return None
    kind = match.group(1).lower().replace("-", "").replace("link", "url")
    items = re.findall(PATTERNS[kind], match.group(2))
    if not items:
        return solved_question("extraction", False, "none", [match.group(2).split()[0]])
    shortened = [item[:-1] for item in items if len(item) > 2]
    fewer = [", ".join(items[:-1])] if len(items) > 1 else []
    return solved_question(
        "extraction", len(items) > 2, ", ".join(items), [*fewer, ", ".join(shortened), f"{items[0]}, {items[0]}x"]
    )


def comparison(text: str) -> SolvedQuestion | None:
    """`Anna is taller than Ben. Ben is taller than Carl. Who is the shortest?`"""
    facts = re.findall(rf"\b([A-Z]\w+) (?:is|was|runs|are) (?:\w+ )?({STEM})\w* than ([A-Z]\w+)", text)
    question = re.search(rf"\bwho (?:is|was|runs) (?:the )?(second[- ])?({STEM})\w*", text, re.IGNORECASE)
    if not facts or question is None:
        return None
    scale, sign = SUPERLATIVES[question.group(2).lower()]
    above = set()
    for first, stem, second in facts:
        stem_scale, stem_sign = SUPERLATIVES[stem]
        if stem_scale == scale and stem_sign > 0:
            above.add((first, second))
        elif stem_scale == scale:
            above.add((second, first))
    ranking = _ranking(above)
    if ranking is None or (question.group(1) and len(ranking) < 3):
        return None
    if sign < 0:
        ranking.reverse()
    place = 0
    if question.group(1):
        place = 1
    others = ranking[:place] + ranking[place + 1 :]
    return solved_question("logic", len(ranking) > 3 or place > 0, ranking[place], others)


def _ranking(above: set[tuple[str, str]]) -> list[str] | None:
    """Return all names from the highest to the lowest, if the facts leave exactly one order."""
    names = {name for pair in above for name in pair}
    order: list[str] = []
    while names:
        lower = {second for first, second in above if first in names}
        tops = list(names - lower)
        if len(tops) != 1:
            return None
        order.append(tops[0])
        names.discard(tops[0])
    return order


def syllogism(text: str) -> SolvedQuestion | None:
    """`All bloops are razzies. All razzies are lazzies. Are all bloops lazzies?`"""
    facts = {(a.lower(), b.lower()) for a, b in re.findall(r"\ball (\w+) are (\w+)\b", text, re.IGNORECASE)}
    question = re.search(r"\bare all (\w+) (\w+)\?", text, re.IGNORECASE)
    if not facts or question is None:
        return None
    members, new_members = {question.group(1).lower()}, {question.group(1).lower()}
    while new_members:
        new_members = {kind for member, kind in facts if member in new_members} - members
        members |= new_members
    right, other = ("yes", "no") if question.group(2).lower() in members else ("no", "yes")
    return solved_question("logic", len(facts) > 2, right, [other, "it cannot be said"])
