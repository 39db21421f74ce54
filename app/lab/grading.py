"""Graders: what an answer is worth, decided by rules alone. Pure, deterministic, and with bounded work on any text.

A grader is written as data, in a task set or for `baton grade`:

    {"kind": "exact", "expected": ["Paris", "the city of Paris"], "case": false}
    {"kind": "numeric", "expected": "42", "tolerance": "0.01", "relative": "0"}
    {"kind": "choice", "expected": "B", "options": ["London", "Paris"]}
    {"kind": "regex", "pattern": "(?i)^yes\\b"}
    {"kind": "schema", "schema": {"type": "object", "required": ["x"]}}
    {"kind": "tests", "tests": "assert double(2) == 4", "seconds": 5}

An answer that argues before it concludes is read at its conclusion: the last `\\boxed{...}`, the last `#### ...`, or
what follows the last "the answer is" or "answer:". Nothing that an answer says can make a grader raise. Unit tests are
run by the caller's function (`execute`), since this module runs no processes.
"""

import ast
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Protocol

from msgspec import Struct

from app.core.message.chat import Form
from app.core.message.response_format import faults, schema_fault

VERSION = "grading-2"
"""Names these rules with every grade; a change of what they count as right is another version."""
MOST_CHARS = 200_000
"""Characters that a grader reads of an answer, from its end."""
ALTERNATIVES = 100
"""Most answers that an exact grader takes for right, and most options of a choice."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

Execute = Callable[[str, str, float], str | None]
"""Runs code, then tests, for at most so many seconds, in a sandbox; None if all passed, else in a few words why not."""
MOST_SECONDS = 60.0

_FENCED = re.compile(r"^```[ \t]*([A-Za-z0-9]*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
MOST_INDENTATION = 8
"""Most characters before an option's letter at the beginning of a line."""
_QUOTES = "*`\"' \u201c\u201d\u2018\u2019"
_BOXED = "\\boxed{"
_HASHES = re.compile(r"^#{4}[ \t]*(\S[^\n]*)$", re.MULTILINE)
_SAID = re.compile(r"\banswer(?: is\b\s{0,3}:?|\s?[:=])[*\s]{0,4}", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:(?:\d{1,3}(?:,\d{3}){1,12}|\d{1,40})(?:\.\d{1,40})?|\.\d{1,40})(?:[eE][-+]?\d{1,3})?(?:\s?/\s?\d{1,40})?"
)
_FRACTION = re.compile(r"([-+]?)((?<!\d)\d{1,40})?\s?\\[dt]?frac\{\s?([-+]?\d{1,40})\s?\}\{\s?(\d{1,40})\s?\}")
"""LaTeX's fractions: their sign, the whole number before them, and what is above and below the line."""
_LETTER = re.compile(r"(?<![\w'])([A-Z](?![\w'])|[a-z](?=[).,:;]))")
"""Letters that may be a choice; a lower-case one that stands before a word is an article."""
_MARKED = re.compile(r"(?:\(([A-Z])\)|\*\*([A-Z])\*\*|\b(?:[Oo]ption|[Cc]hoice)\s([A-Z])\b|^\s{0,8}([A-Z])[).:])", re.M)


class Grade(Struct, frozen=True):
    """The worth of an answer, from 0 (wrong) to 1 (right), and in a few words why. The words hold nothing of it."""

    score: float
    reason: str


class Grader(Protocol):
    """A rule."""

    @property
    def kind(self) -> str:
        """Return the name of this kind of rule in a task set."""
        ...

    def grade(self, answer: str) -> Grade:
        """Return the grade of an answer; never raises."""
        ...


class Exact(Struct, frozen=True):
    """The answer, or its conclusion, is one of these; spaces, quotes and the last full stop do not count."""

    expected: tuple[str, ...]
    case: bool = False
    """True if upper and lower case differ."""
    kind: ClassVar[str] = "exact"

    def grade(self, answer: str) -> Grade:
        """Return the grade 1 for a match, else 0."""
        accepted = set(map(self._plain, self.expected))
        text = answer[-MOST_CHARS:]
        return _grade(self._plain(text) in accepted or self._plain(conclusion(text) or text) in accepted)

    def _plain(self, text: str) -> str:
        words = " ".join(unicodedata.normalize("NFC", text).split())
        words = words.strip(_QUOTES).removesuffix(".").strip(_QUOTES)
        if self.case:
            return words
        return words.casefold()


class Numeric(Struct, frozen=True):
    """The number that the answer concludes with is within the tolerance of the expected one.

    That is the number behind the conclusion's last `=`, or its first one; without a conclusion, the answer's last.
    """

    expected: Fraction
    tolerance: Fraction = Fraction(0)
    """The largest deviation that is accepted."""
    relative: Fraction = Fraction(0)
    """The tolerance as a share of the expected number; the larger of the two counts."""
    kind: ClassVar[str] = "numeric"

    def grade(self, answer: str) -> Grade:
        """Return the grade 1 for a number that is near enough, else 0."""
        number = number_in(answer)
        if number is None:
            return Grade(0.0, "no number")
        return _grade(abs(number - self.expected) <= max(self.tolerance, self.relative * abs(self.expected)))


class Choice(Struct, frozen=True):
    """The letter that the answer chooses, or the text of the option that it stands for."""

    expected: str
    """One capital letter."""
    options: tuple[str, ...] = ()
    """The options that the letters from A on stand for; empty where only the letter is compared."""
    kind: ClassVar[str] = "choice"

    def grade(self, answer: str) -> Grade:
        """Return the grade 1 for the right letter, else 0."""
        chosen = self._find_letter(answer[-MOST_CHARS:])
        if chosen is None:
            return Grade(0.0, "no choice")
        return _grade(chosen == self.expected)

    def _find_letter(self, answer: str) -> str | None:
        """Return the letter of the option that an answer is or states: its whole text or conclusion, else the first
        letter of the conclusion, else the last letter that the answer marks as a choice."""
        stated = conclusion(answer)
        letters = letters_of(self.options)
        texts = [answer.strip()]
        if stated is not None:
            texts.insert(0, stated)
        for text in texts:
            for place, option in enumerate(self.options):
                if Exact((option,)).grade(text).score:
                    return LETTERS[place]
            alone = text.strip("*`()[].: \n").upper()
            if len(alone) == 1 and alone in letters:
                return alone
        marked = _find_marked_letters(stated or answer, letters)
        if stated is not None and not marked:
            marked = [letter.upper() for letter in _LETTER.findall(stated)]
        marked = [letter for letter in marked if letter in letters]
        if not marked:
            return None
        if stated is None:
            return marked[-1]
        return marked[0]


def letters_of(options: Sequence[str]) -> str:
    """Return the letters of a choice's options; all letters where the options are not given."""
    if not options:
        return LETTERS
    return LETTERS[: len(options)]


def _find_marked_letters(text: str, letters: str) -> list[str]:
    """Return the letters that a text marks as choices, such as `(B)`, `**B**` or `option B`.

    Where the beginnings of lines repeat all options, the first mark of each there is no choice.
    """
    marked: list[str] = []
    listed: dict[str, int] = {}
    for match in _MARKED.finditer(text):
        letter = "".join([group for group in match.groups() if group])
        begin = text.rfind("\n", 0, match.start()) + 1
        if match.start() - begin <= MOST_INDENTATION and not text[begin : match.start()].strip(" \t*-"):
            listed.setdefault(letter, len(marked))
        marked.append(letter)
    if set(letters) <= set(listed):
        places = set(listed.values())
        return [letter for place, letter in enumerate(marked) if place not in places]
    return marked


class Regex(Struct, frozen=True):
    """Some part of the answer matches the pattern. A pattern that needs too many steps does not match."""

    pattern: str
    kind: ClassVar[str] = "regex"

    def grade(self, answer: str) -> Grade:
        """Return the grade 1 for a match, else 0."""
        # The schema validator's engine bounds its backtracking; Python's own does not.
        form = Form({"type": "object", "properties": {"text": {"type": "string", "pattern": self.pattern}}})
        return _grade(not faults(form, _as_json(answer[-MOST_CHARS:])))


class Schema(Struct, frozen=True):
    """The answer is JSON, alone or in one code fence, and validates against a JSON schema."""

    schema: Mapping[str, Any]
    kind: ClassVar[str] = "schema"

    def grade(self, answer: str) -> Grade:
        """Return the grade 1 for an answer that validates, else 0."""
        if len(answer) > MOST_CHARS:
            return Grade(0.0, "too long")
        document = answer
        fenced = re.fullmatch(r"\s*```(?:json)?[ \t]*\n(.*?)\n?```\s*", answer, re.DOTALL)
        if fenced:
            document = fenced.group(1)
        # Half a pair of surrogates cannot be validated.
        return _grade(not faults(Form(self.schema), document.encode("utf-8", "replace").decode()))


class UnitTests(Struct, frozen=True):
    """The Python code of the answer passes these tests: assertions, functions called `test...`, test cases, or classes
    called `Test...` with methods called `test...`."""

    tests: str
    execute: Execute
    seconds: float = 5.0
    kind: ClassVar[str] = "tests"

    def grade(self, answer: str) -> Grade:
        """Return the grade 1 if everything passes in time, else 0."""
        failed = self.execute(code_in(answer), self.tests, self.seconds)
        if failed is None:
            return _grade(True)
        return Grade(0.0, failed)


def code_in(answer: str) -> str:
    """Return the last fenced block that says it is Python, else the last one, else the whole answer."""
    chosen = text = answer[-MOST_CHARS:]
    has_python = False
    for language, code in _FENCED.findall(text):
        is_python = language.lower() in ("python", "py", "python3")
        if is_python or not has_python:
            chosen = code
        has_python = has_python or is_python
    return str(chosen)


def grader(spec: object, execute: Execute | None = None) -> Grader:
    """Return the grader that a specification stands for. Raises ValueError, which says what to correct."""
    kind = spec.get("kind") if isinstance(spec, Mapping) else None
    if not isinstance(spec, Mapping) or not isinstance(kind, str) or kind not in FIELDS:
        raise ValueError(f"a grader must be an object whose kind is one of {', '.join(FIELDS)}")
    unknown = sorted(map(str, set(spec) - FIELDS[kind] - {"kind"}))
    if unknown:
        raise ValueError(f"a {kind} grader has no field {unknown[0][:40]}; it has {', '.join(sorted(FIELDS[kind]))}")
    if kind == "tests":
        return _tests(spec, execute)
    return _MAKERS[kind](spec)


def conclusion(answer: str) -> str | None:
    """Return the result that an answer states; None if it does not say so."""
    text = answer[-MOST_CHARS:]
    if (boxed := _find_last_box(text)) is not None:
        return boxed
    if hashes := _HASHES.findall(text):
        return str(hashes[-1]).strip()
    matches = list(_SAID.finditer(text))
    if not matches:
        return None
    stated = text[matches[-1].end() :].partition("\n")[0].strip()
    return stated or None


def number_in(answer: str) -> Fraction | None:
    """Return the number that an answer concludes with, exactly; None if there is none, or none that can be read."""
    text = answer[-MOST_CHARS:].replace("\u2212", "-").replace("{,}", ",")
    text = _FRACTION.sub(_plain_fraction, text)
    stated = conclusion(text)
    if stated is not None and "=" in stated:
        stated = stated.rpartition("=")[2]
    if stated is not None:
        number = _NUMBER.search(stated)
        if number:
            return _fraction(number.group())
        if any(map(str.isdecimal, stated)):
            return None
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    return _fraction(numbers[-1])


def _find_last_box(text: str) -> str | None:
    """Return the content of the last box; its braces may nest."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth, begin = 1, start + len(_BOXED)
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[begin:at]
    return None


def _plain_fraction(match: re.Match[str]) -> str:
    """Return a fraction of LaTeX in the form 1/2."""
    sign, whole, over, under = match.groups()
    if whole is not None:
        over = str(int(whole) * int(under) + int(over))
    return f" {sign}{over}/{under}"


def _fraction(text: str) -> Fraction | None:
    over, _, under = text.replace(",", "").replace(" ", "").partition("/")
    if not under:
        return Fraction(over)
    if not int(under):
        return None
    return Fraction(over) / int(under)


def _grade(right: bool) -> Grade:
    if right:
        return Grade(1.0, "right")
    return Grade(0.0, "wrong")


def _as_json(text: str) -> str:
    """Return JSON whose field `text` is this text."""
    text = text.encode("utf-8", "replace").decode()  # half a pair of surrogates cannot be validated
    escapes = {ord(char): f"\\u{ord(char):04x}" for char in ['"', "\\", *map(chr, range(32))]}
    return f'{{"text": "{text.translate(escapes)}"}}'


# -- from data


def _exact(spec: Mapping[str, Any]) -> Grader:
    expected = spec.get("expected")
    if isinstance(expected, str):
        expected = [expected]
    if not isinstance(expected, list) or not 0 < len(expected) <= ALTERNATIVES or not _texts(expected):
        raise ValueError(f"an exact grader needs expected: a text, or a list of at most {ALTERNATIVES} of them")
    if not isinstance(spec.get("case", False), bool):
        raise ValueError("case of an exact grader must be true or false")
    return Exact(tuple(expected), spec.get("case", False))


def _numeric(spec: Mapping[str, Any]) -> Grader:
    expected = _figure(spec.get("expected"))
    tolerance = _figure(spec.get("tolerance", 0))
    relative = _figure(spec.get("relative", 0))
    if expected is None or tolerance is None or relative is None:
        raise ValueError("a numeric grader needs expected, a number; tolerance and relative are numbers too")
    if tolerance < 0 or relative < 0:
        raise ValueError("tolerance and relative of a numeric grader must not be negative")
    return Numeric(expected, tolerance, relative)


def _figure(value: object) -> Fraction | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    text = str(value).strip()
    if not _NUMBER.fullmatch(text):
        return None
    return _fraction(text)


def _choice(spec: Mapping[str, Any]) -> Grader:
    options = spec.get("options", [])
    if not isinstance(options, list) or not _texts(options) or len(options) > len(LETTERS):
        raise ValueError(f"options of a choice grader must be a list of at most {len(LETTERS)} texts")
    expected = spec.get("expected")
    letters = letters_of(options)
    if not isinstance(expected, str) or len(expected) != 1 or expected.upper() not in letters:
        raise ValueError(f"expected of a choice grader must be one letter from A to {letters[-1]}")
    return Choice(expected.upper(), tuple(options))


def _regex(spec: Mapping[str, Any]) -> Grader:
    pattern = spec.get("pattern")
    if not isinstance(pattern, str) or not pattern or schema_fault({"type": "string", "pattern": pattern}):
        raise ValueError("a regex grader needs pattern: a regular expression as JSON Schema knows them")
    return Regex(pattern)


def _schema(spec: Mapping[str, Any]) -> Grader:
    schema = spec.get("schema")
    if not isinstance(schema, Mapping):
        raise ValueError("a schema grader needs schema: a JSON schema as an object")
    if fault := schema_fault(schema):
        raise ValueError(f"the schema of a schema grader cannot be used: {fault}")
    return Schema(dict(schema))


def _tests(spec: Mapping[str, Any], execute: Execute | None) -> Grader:
    tests, seconds = spec.get("tests"), spec.get("seconds", 5)
    if not isinstance(tests, str) or not tests.strip():
        raise ValueError("a tests grader needs tests: Python code that fails for a wrong answer")
    if not _runs_something(tests):
        raise ValueError("the tests of a tests grader check nothing; add an assertion, or a function called test...")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MOST_SECONDS:
        raise ValueError(f"seconds of a tests grader must be a number from above 0 to {MOST_SECONDS:.0f}")
    if execute is None:
        raise ValueError("a tests grader runs code, and nothing is run here")
    return UnitTests(tests, execute, float(seconds))


def _runs_something(tests: str) -> bool:
    """Return False for tests that would pass for every answer, because they only define what nothing calls.

    Raises ValueError if they are no Python.
    """
    try:
        statements = ast.parse(tests).body
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("the tests of a tests grader are no Python") from None
    return any(map(_is_run, statements))


def _is_run(statement: ast.stmt) -> bool:
    """Return True for a statement that can fail: one that is executed, or a test that is looked for by its name."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return statement.name.startswith("test")
    if isinstance(statement, ast.ClassDef):
        methods = [item.name for item in statement.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
        has_tests = any([name.startswith("test") for name in methods])
        return bool(statement.bases) or (statement.name.startswith("Test") and has_tests)
    return any([isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in ast.walk(statement)])


def _texts(value: list[object]) -> bool:
    """Return True for a list of texts, none of which is empty."""
    return all([isinstance(text, str) and text for text in value])


FIELDS: Mapping[str, frozenset[str]] = {
    "exact": frozenset({"expected", "case"}),
    "numeric": frozenset({"expected", "tolerance", "relative"}),
    "choice": frozenset({"expected", "options"}),
    "regex": frozenset({"pattern"}),
    "schema": frozenset({"schema"}),
    "tests": frozenset({"tests", "seconds"}),
}
"""The kinds of graders, and the fields of each."""
_MAKERS = {"exact": _exact, "numeric": _numeric, "choice": _choice, "regex": _regex, "schema": _schema}
