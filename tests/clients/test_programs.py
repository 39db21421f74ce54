"""The programs over frameworks, which only `make test-clients` starts, take no name that their report does not have."""

import ast
from pathlib import Path

DRIVES = Path(__file__).parent / "frameworks" / "drives"


def test_the_programs_take_nothing_that_their_report_does_not_have() -> None:
    report = ast.parse((DRIVES / "report.py").read_text())
    names = {node.name for node in ast.walk(report) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    names |= {node.name for node in ast.walk(report) if isinstance(node, ast.AsyncFunctionDef)}
    names |= {node.id for node in ast.walk(report) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    programs = sorted(DRIVES.glob("by_*.py"))
    assert programs
    for program in programs:
        for node in ast.walk(ast.parse(program.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "report":
                assert {name.name for name in node.names} <= names, program.name
