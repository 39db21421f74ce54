"""The guide for contributors names only files and definitions that exist, and few of them for each task."""

import ast
import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (ROOT / "deploy" / "docs" / "contributing.md").read_text()
NAMED: Final = sorted(set(re.findall(r"`((?:app|tests)/[\w/]+\.py(?::[\w.]+)?)`", PAGE)))
MOST: Final = {
    "A time-out": 5,
    "A wire format": 4,
    "A field": 5,
    "A new kind": 5,
    "A fact": 7,
    "A limit": 5,
    "A ticket": 5,
}
"""Files that a newcomer opens for each task, at most."""


def definitions(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """The dotted names of all classes, functions and assigned names of a module."""
    names = set()
    for node in body:
        if isinstance(node, ast.ClassDef):
            names |= {prefix + node.name} | definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(prefix + node.name)
        elif isinstance(node, ast.Assign):
            names |= {prefix + target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(prefix + node.target.id)
    return names


@pytest.mark.parametrize("path_and_name", NAMED)
def test_what_the_page_names_exists(path_and_name: str) -> None:
    path, _, name = path_and_name.partition(":")
    assert (ROOT / path).is_file(), path
    if name:
        assert name in definitions(ast.parse((ROOT / path).read_text()).body), path_and_name


@pytest.mark.parametrize("task", MOST)
def test_a_task_needs_few_files(task: str) -> None:
    (section,) = re.findall(rf"^## {task}.*?\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    steps = "\n".join(re.findall(r"^\d\. .*(?:\n   .*)*", section, re.MULTILINE))
    files = set(re.findall(r"`(app/[\w/]+\.py)", steps))
    assert 0 < len(files) <= MOST[task]


def test_a_name_that_does_not_exist_is_noticed() -> None:
    assert "decide" in definitions(ast.parse("def decide(): ...").body)
    assert "Driver.drive" in definitions(ast.parse("class Driver:\n    async def drive(self): ...").body)
    assert "drive" not in definitions(ast.parse("class Driver:\n    async def drive(self): ...").body)
