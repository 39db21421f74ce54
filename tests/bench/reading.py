"""`python -m tests.bench.reading`: figures about how the code of `app/` reads, beside those of starlette and httpx.

The figures are counted from the syntax trees of the files. Code lines are lines that hold a token other than a comment
or a docstring. Figures "per 1,000" are per 1,000 of them.

    comprehensions            list, set and dict comprehensions, and generator expressions
    with two loops            those with more than one `for`
    nested comprehensions     those that stand inside another one, anywhere but in its first iterable
    conditional expressions   `a if b else c`
    nested conditionals       those that stand inside another one
    bare fragments            docstrings of public modules, classes and functions whose first sentence begins like a
                              relative clause ("What ...", "Whether ...", "Who ...") and so has no verb of its own
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PEERS: Final = ("starlette", "httpx")
COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DEFINITIONS: Final = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FRAGMENT: Final = re.compile(r"(What|Whether|Who|Whom|Whose|Those|The same|How|Why|Where|Until|Of|As)\b")
SILENT_TOKENS: Final = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


@dataclass
class Figures:
    """Counts over a set of modules."""

    modules: int = 0
    functions: int = 0
    code_lines: int = 0
    comprehensions: int = 0
    two_loops: int = 0
    nested_comprehensions: int = 0
    conditionals: int = 0
    nested_conditionals: int = 0
    fragments: int = 0

    def per_thousand(self, count: int) -> float:
        """Return a count for each 1,000 code lines."""
        return 1000 * count / self.code_lines if self.code_lines else 0.0


def sources(folder: Path) -> list[Path]:
    """Return the Python files below a folder, or the file itself."""
    return [folder] if folder.is_file() else sorted(folder.rglob("*.py"))


def figures(paths: Sequence[Path]) -> Figures:
    """The figures of some modules."""
    figures_found = Figures()
    for path in paths:
        source = path.read_text()
        tree = ast.parse(source)
        nodes = list(ast.walk(tree))
        figures_found.modules += 1
        figures_found.functions += sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
        figures_found.code_lines += _code_lines(source, tree)
        figures_found.comprehensions += sum(isinstance(node, COMPREHENSIONS) for node in nodes)
        figures_found.two_loops += sum(isinstance(node, COMPREHENSIONS) and len(node.generators) > 1 for node in nodes)
        figures_found.nested_comprehensions += len(find_nested_comprehensions(tree))
        figures_found.conditionals += sum(isinstance(node, ast.IfExp) for node in nodes)
        figures_found.nested_conditionals += len(find_nested_conditionals(tree))
        figures_found.fragments += len(fragments(tree))
    return figures_found


def find_nested_comprehensions(tree: ast.AST) -> list[ast.expr]:
    """Return the comprehensions that are evaluated once for each item of another one."""
    nested: dict[ast.expr, None] = {}
    for outer in ast.walk(tree):
        if isinstance(outer, COMPREHENSIONS):
            first = outer.generators[0].iter
            outside = {inner for inner in ast.walk(first) if isinstance(inner, COMPREHENSIONS)}
            for inner in ast.walk(outer):
                if isinstance(inner, COMPREHENSIONS) and inner is not outer and inner not in outside:
                    nested[inner] = None
    return list(nested)


def find_nested_conditionals(tree: ast.AST) -> list[ast.expr]:
    """Return the conditional expressions that stand inside another one."""
    nested: dict[ast.expr, None] = {}
    for outer in ast.walk(tree):
        if isinstance(outer, ast.IfExp):
            for inner in ast.walk(outer):
                if isinstance(inner, ast.IfExp) and inner is not outer:
                    nested[inner] = None
    return list(nested)


def fragments(tree: ast.Module) -> list[str]:
    """Return the public docstrings that begin like a relative clause, each with the name of what it belongs to."""
    all_fragments = []
    for name, node in _list_documented(tree, ""):
        docstring = ast.get_docstring(node)
        if docstring and is_fragment(docstring):
            all_fragments.append(f"{name}: {docstring.splitlines()[0]}")
    return all_fragments


def is_fragment(docstring: str) -> bool:
    """Return whether a docstring opens with a clause instead of a sentence.

    A clause that a main clause follows ("Where X, the run ends.") counts as well: the rule is about the first word, so
    that a reader finds the subject first.
    """
    return FRAGMENT.match(docstring) is not None


def _list_documented(node: Documented, prefix: str) -> Iterator[tuple[str, Documented]]:
    """A module, and its public classes, methods and functions."""
    yield prefix.rstrip(".") or "module", node
    for child in node.body:
        if isinstance(child, DEFINITIONS) and not child.name.startswith("_"):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            yield from _list_documented(child, f"{prefix}{child.name}.")


def _code_lines(source: str, tree: ast.Module) -> int:
    """Lines with a token other than a comment or a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _find_installed(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _row(label: str, values: Sequence[object]) -> str:
    cells = "".join(f"{value!s:>12}" for value in values)
    return f"{label:<40}{cells}"


def table(columns: dict[str, Figures]) -> str:
    """Return the figures side by side, one column for each name."""
    all_figures = list(columns.values())
    counted = {
        "comprehensions per 1,000": "comprehensions",
        "with two loops per 1,000": "two_loops",
        "nested comprehensions per 1,000": "nested_comprehensions",
        "conditional expressions per 1,000": "conditionals",
        "nested conditionals per 1,000": "nested_conditionals",
    }
    rows = [_row("", list(columns))]
    for name in ("modules", "functions", "code_lines", "nested_comprehensions", "nested_conditionals", "fragments"):
        label = "bare fragments" if name == "fragments" else name.replace("_", " ")
        rows.append(_row(label, [getattr(column, name) for column in all_figures]))
    for label, name in counted.items():
        rows.append(_row(label, [f"{column.per_thousand(getattr(column, name)):.1f}" for column in all_figures]))
    return "\n".join(rows)


def rooms() -> dict[str, Figures]:
    """Return the figures of each room of `app/`, and of the files at its top."""
    by_room = {}
    for path in sorted((ROOT / "app").iterdir()):
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__"):
            by_room[path.name] = figures(sources(path))
    return by_room


def main() -> None:
    """Print the table of the whole application beside its peers, then the counts for each room."""
    columns = {"app": figures(sources(ROOT / "app"))}
    for name in PEERS:
        columns[name] = figures(sources(_find_installed(name)))
    print(table(columns))
    print()
    print(_row("room", ["code lines", "nested c.", "nested if", "fragments"]))
    for name, room in rooms().items():
        counts = (room.code_lines, room.nested_comprehensions, room.nested_conditionals, room.fragments)
        print(_row(name, counts))


if __name__ == "__main__":
    main()
