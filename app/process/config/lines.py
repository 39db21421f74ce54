"""The line numbers of the keys in a TOML text, so that a fault can name its line.

`tomllib` keeps no positions. This module finds the statements of a text that `tomllib` has already accepted, so it may
rely on its syntax: tables, dotted keys, multi-line strings and arrays. A key inside an inline table or an array has the
line on which the statement begins.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

Path = tuple[str, ...]
PART = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|\'([^\']*)\'|([A-Za-z0-9_-]+))\s*(\.?)')
TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"""+|\'\'\'.*?\'\'\'+|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}\n]', re.DOTALL
)


def line_numbers(text: str) -> dict[Path, int]:
    """Return the line (from 1) of every table and key; a table's ancestors have the line of their first mention."""
    numbers: dict[Path, int] = {}
    table: Path = ()
    for start, statement in _statements(text):
        line = text.count("\n", 0, start) + 1
        if statement.startswith("["):
            table = _key(statement.lstrip("["))
            path = table
        else:
            path = table + _key(statement)
        for length in range(1, len(path) + 1):
            numbers.setdefault(path[:length], line)
    return numbers


def line_of(lines: Mapping[Path, int], path: Sequence[str | int]) -> int:
    """Return the line of a path, or of its nearest ancestor that has one; 1 if none has."""
    names = tuple(str(part) for part in path)
    return next((lines[names[:length]] for length in range(len(names), 0, -1) if names[:length] in lines), 1)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield each statement with its offset: a header, or a key with its value, without comments and blank lines."""
    begin, depth = 0, 0
    for token in TOKEN.finditer(text + "\n"):
        kind = token.group()
        if kind in "[{":
            depth += 1
        elif kind in "]}":
            depth -= 1
        elif kind == "\n" and depth == 0:
            raw = text[begin : token.start()]
            bare = raw.strip()
            if bare and not bare.startswith("#"):
                yield begin + len(raw) - len(raw.lstrip()), bare
            begin = token.end()


def _key(statement: str) -> Path:
    parts: list[str] = []
    position = 0
    while match := PART.match(statement, position):
        parts.append(next(group for group in match.groups()[:3] if group is not None))
        position = match.end()
        if not match.group(4):
            break
    return tuple(parts)
