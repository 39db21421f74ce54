"""The figures about how code reads count what they say. `tests/test_architecture.py` holds the app to some of them."""

import ast

import pytest

from tests.bench.reading import (
    ROOT,
    figures,
    find_nested_comprehensions,
    find_nested_conditionals,
    fragments,
    is_fragment,
)


@pytest.mark.parametrize(
    ("source", "comprehensions", "conditionals"),
    [
        ("[x for x in y]", 0, 0),
        ("[x for x in [y for y in z]]", 0, 0),
        ("[[x for x in y] for y in z]", 1, 0),
        ("[x for y in z for x in y]", 0, 0),
        ("{x: (y for y in x) for x in z if any(w for w in x)}", 2, 0),
        ("a if b else c", 0, 0),
        ("a if b else c if d else e", 0, 1),
    ],
)
def test_nested_expressions_are_counted(source: str, comprehensions: int, conditionals: int) -> None:
    tree = ast.parse(source)
    assert len(find_nested_comprehensions(tree)) == comprehensions
    assert len(find_nested_conditionals(tree)) == conditionals


def test_fragments_are_found_in_what_is_public() -> None:
    public_source = 'def shown() -> None:\n    """Whether it is."""\n'
    own = 'def _own() -> None:\n    """Who is."""\n'
    source = f'"""What it is."""\n\n\n{public_source}\n\n{own}'
    assert fragments(ast.parse(source)) == ["module: What it is.", "shown: Whether it is."]
    assert not is_fragment("Return what it is.")
    assert not is_fragment("Whatever fails is logged.")


def test_code_lines_leave_out_comments_and_docstrings() -> None:
    path = ROOT / "app" / "cli" / "event_loop.py"
    code = figures([path])
    assert (code.modules, code.functions) == (1, 1)
    assert 0 < code.code_lines < len(path.read_text().splitlines())
