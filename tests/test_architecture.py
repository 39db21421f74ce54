"""The rules that no other tool checks: names, sizes, docstrings, stray tasks, module state; and the imports.

Each rule is a function from one module to its violations. Each is also shown a piece of bad source, so that a rule that
has stopped working does not look like a tree without faults.
"""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from tests.bench import reading

ROOT: Final = Path(__file__).resolve().parent.parent
BANNED: Final = {"util", "helper", "common", "misc", "base", "manager", "service", "handler", "processor", "impl"}
MODULE_LINES: Final = 900
"""A deep module is better than two that are always read together; a file beyond this holds more than one thought."""
FUNCTION_LINES: Final = 60
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)

# A module-level name may be bound to what cannot change, or is a constant by its spelling or its type.
CONSTANT_NAME: Final = re.compile(r"_?[A-Z][A-Z0-9_]*|__\w+__")
CONSTANT_TYPES: Final = {"Final", "Mapping", "Sequence", "TypeAlias", "frozenset", "tuple", "Callable"}
VALUE_CALLS: Final = {
    "NewType",
    "TypeVar",
    "ParamSpec",
    "TypeVarTuple",
    "getLogger",
    "frozenset",
    "tuple",
    "namedtuple",
}
PACED: Final = ("tests/bench/", "tests/simulation/")
DURATION_NAME: Final = re.compile(r"(?i)seconds|delay|pause|lease|gap|silence|pace")
"""The words of which the name of a duration has one."""
COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SHORTENED_SCRIPTS: Final = ("tests/cli/recompute_report.py",)
"""It must be a script of a hundred lines, which an auditor can take along."""
CONTAINERS: Final = (ast.List, ast.Dict, ast.Set)
CONTAINER_CALLS: Final = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray"}


@dataclass(frozen=True)
class Module:
    """One source file as the rules see it."""

    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed once for all rules, and let go of with the module: to keep every tree costs the collector as much."""
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> Mapping[type[ast.AST], list[Any]]:
        """Every node of the tree by its kind, walked once for all rules."""
        found: dict[type[ast.AST], list[Any]] = defaultdict(list)
        for node in ast.walk(self.tree):
            found[type(node)].append(node)
        return found

    def of(self, *kinds: type[ast.AST]) -> list[Any]:
        """Every node of these kinds."""
        return [node for kind in kinds for node in self.nodes.get(kind, ())]


Rule = Callable[[Module], Iterator[str]]


def names_are_nouns(module: Module) -> Iterator[str]:
    """A file is named by the thing it holds, not by a role."""
    for part in Path(module.path).with_suffix("").parts:
        for word in part.lower().split("_"):
            if word in BANNED or word.removesuffix("s") in BANNED:
                yield f"{module.path}: '{word}' says nothing about what is inside"


def modules_are_short(module: Module) -> Iterator[str]:
    lines = len(module.source.splitlines())
    if lines > MODULE_LINES:
        yield f"{module.path}: {lines} lines, at most {MODULE_LINES}"


def functions_are_short(module: Module) -> Iterator[str]:
    for node in module.of(*FUNCTIONS):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES:
            yield f"{module.path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES}"


def modules_say_what_they_are(module: Module) -> Iterator[str]:
    if not ast.get_docstring(module.tree):
        yield f"{module.path}: no docstring"


def imports_stand_at_the_top(module: Module) -> Iterator[str]:
    if not any(node.col_offset for node in module.of(ast.Import, ast.ImportFrom)):
        return
    for function in module.of(*FUNCTIONS):
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield f"{module.path}:{node.lineno}: import inside {function.name}"


def tasks_have_owners(module: Module) -> Iterator[str]:
    """Task groups may create tasks; the loop and asyncio itself may not."""
    for node in module.of(ast.ImportFrom, ast.Attribute):
        if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
            bare = {alias.name for alias in node.names} & {"create_task", "ensure_future"}
        elif isinstance(node, ast.Attribute) and node.attr in {"create_task", "ensure_future"}:
            bare = {node.attr} if re.search(r"\b(asyncio|\w*loop\w*)\b", ast.unparse(node.value)) else set()
        else:
            continue
        if bare:
            yield f"{module.path}:{node.lineno}: a bare {bare.pop()}; use asyncio.TaskGroup"


def modules_hold_no_state(module: Module) -> Iterator[str]:
    """Nothing at module level can be changed at run time, by mutation or by `global`."""
    for node in module.of(ast.Global):
        yield f"{module.path}:{node.lineno}: global {', '.join(node.names)}"
    for node in module.tree.body:
        if isinstance(node, ast.Assign):
            names, annotation = [ast.unparse(target) for target in node.targets], ""
        elif isinstance(node, ast.AnnAssign):
            names, annotation = [ast.unparse(node.target)], ast.unparse(node.annotation)
        else:
            continue
        if node.value is not None and _is_state(node.value, names, annotation):
            yield f"{module.path}:{node.lineno}: {', '.join(names)} is module-level state"


def _is_state(value: ast.expr, names: list[str], annotation: str) -> bool:
    call = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
    if call == "ContextVar" or _is_empty_container(value, call):
        return True
    constant = all(CONSTANT_NAME.fullmatch(name) for name in names)
    typed = annotation.partition("[")[0].rpartition(".")[2] in CONSTANT_TYPES
    if constant or typed or call in VALUE_CALLS:
        return False
    return bool(call) or isinstance(value, (*CONTAINERS, ast.ListComp, ast.DictComp, ast.SetComp))


def _is_empty_container(value: ast.expr, call: str) -> bool:
    """An empty constant is of no use to anybody who does not mean to fill it."""
    if isinstance(value, ast.Call):
        return call in CONTAINER_CALLS and not value.args and not value.keywords
    return isinstance(value, ast.List | ast.Dict) and not ast.unparse(value).strip("[]{}")


def sleeps_are_behaviour(module: Module) -> Iterator[str]:
    """A test sleeps only for as long as the behaviour under test lasts, and names that duration.

    What a test waits for is a condition of `tests/harness/waiting.py`. Load generators keep a pace, and time is
    simulated in the simulation; both may sleep as they like. `sleep(0)` gives others a turn and takes no time.
    """
    if module.path.startswith(PACED):
        return
    for node in module.of(ast.Call):
        if _last_name(node.func) == "sleep" and node.args:
            duration = ast.unparse(node.args[0])
            if duration != "0" and not DURATION_NAME.search(duration):
                yield f"{module.path}:{node.lineno}: sleep({duration}); use until, wait_until or stays, or name it"


def comprehensions_are_flat(module: Module) -> Iterator[str]:
    """No comprehension stands inside another one: a loop says the same, one thought a line."""
    if module.path in SHORTENED_SCRIPTS:
        return
    for node in module.of(*COMPREHENSIONS):
        for inner in ast.walk(node):
            if isinstance(inner, COMPREHENSIONS) and inner is not node:
                yield f"{module.path}:{inner.lineno}: a comprehension inside another one"


def conditional_expressions_are_flat(module: Module) -> Iterator[str]:
    """No `a if b else c` stands inside another one."""
    for node in module.of(ast.IfExp):
        for inner in reading.find_nested_conditionals(node):
            yield f"{module.path}:{inner.lineno}: {ast.unparse(inner)} inside another conditional expression"


def docstrings_are_sentences(module: Module) -> Iterator[str]:
    """No docstring of what is public begins like a relative clause."""
    for fragment in reading.fragments(module.tree):
        yield f"{module.path}, {fragment}"


def fields_have_one_description(module: Module) -> Iterator[str]:
    """No text stands behind another one: each describes the field before it, and the second would describe nothing."""
    for node in (module.tree, *module.of(ast.ClassDef)):
        for first, second in pairwise(node.body):
            if _is_text(first) and _is_text(second):
                yield f"{module.path}:{second.lineno}: a description behind another one"


def _is_text(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def _last_name(function: ast.expr) -> str:
    """The name behind the last dot of what is called; empty if it has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


EVERYWHERE: Final[tuple[Rule, ...]] = (
    names_are_nouns,
    modules_are_short,
    functions_are_short,
    modules_say_what_they_are,
    comprehensions_are_flat,
)
IN_APP: Final[tuple[Rule, ...]] = (
    conditional_expressions_are_flat,
    docstrings_are_sentences,
    fields_have_one_description,
    imports_stand_at_the_top,
    tasks_have_owners,
    modules_hold_no_state,
)
IN_TESTS: Final[tuple[Rule, ...]] = (sleeps_are_behaviour,)
RULES: Final = EVERYWHERE + IN_APP + IN_TESTS

VIOLATIONS: Final[tuple[tuple[Rule, str, str], ...]] = (
    (names_are_nouns, "app/core/utils.py", ""),
    (names_are_nouns, "app/handlers/chat.py", ""),
    (names_are_nouns, "tests/api/run_helper.py", ""),
    (modules_are_short, "app/x.py", "x = 1\n" * (MODULE_LINES + 1)),
    (functions_are_short, "app/x.py", "class A:\n async def f():\n" + "  x = 1\n" * FUNCTION_LINES),
    (modules_say_what_they_are, "app/x.py", "# a comment is not a docstring\n"),
    (comprehensions_are_flat, "app/x.py", "x = [[b for b in a] for a in y]\n"),
    (comprehensions_are_flat, "tests/x.py", "x = any(a for a in y if all(b for b in a))\n"),
    (conditional_expressions_are_flat, "app/x.py", "x = a if b else c if d else e\n"),
    (docstrings_are_sentences, "app/x.py", "def f():\n 'Whether it is.'\n"),
    (fields_have_one_description, "app/x.py", "class A:\n a: int\n b: int\n 'Of b.'\n 'Of a.'\n"),
    (imports_stand_at_the_top, "app/x.py", "def f():\n import json\n"),
    (imports_stand_at_the_top, "app/x.py", "class A:\n async def f(self):\n  from os import path\n"),
    (tasks_have_owners, "app/x.py", "import asyncio\nasync def f(): asyncio.create_task(g())\n"),
    (tasks_have_owners, "app/x.py", "from asyncio import ensure_future as later\n"),
    (tasks_have_owners, "app/x.py", "async def f(): asyncio.get_running_loop().create_task(g())\n"),
    (modules_hold_no_state, "app/x.py", "seen = []\n"),
    (modules_hold_no_state, "app/x.py", "CACHE: dict[str, int] = {}\n"),
    (modules_hold_no_state, "app/x.py", "SEEN = set()\n"),
    (modules_hold_no_state, "app/x.py", "client = Client()\n"),
    (modules_hold_no_state, "app/x.py", "CURRENT = contextvars.ContextVar('current')\n"),
    (modules_hold_no_state, "app/x.py", "X = 1\ndef f():\n global X\n X = 2\n"),
    (sleeps_are_behaviour, "tests/gateway/test_x.py", "import time\ntime.sleep(0.1)\n"),
    (sleeps_are_behaviour, "tests/gateway/test_x.py", "async def f(): await asyncio.sleep(2 * 0.5)\n"),
    (sleeps_are_behaviour, "tests/gateway/test_x.py", "from time import sleep\nsleep(1)\n"),
    (sleeps_are_behaviour, "tests/gateway/test_x.py", "import time\ntime.sleep(x)\n"),
)

CLEAN: Final = '''"""A module with nothing wrong."""
import asyncio
import logging
from collections.abc import Mapping
from typing import Final, NewType

RunId = NewType("RunId", str)
LIMITS = {"steps": 5}
names: Final = ["a", "b"]
prices: Mapping[str, int] = {"a": 1}
logger = logging.getLogger(__name__)
__all__ = ["RunId"]

async def run() -> None:
    local: list[int] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0))
        group.create_task(asyncio.sleep(2 * LEASE_SECONDS))
'''


@pytest.fixture(scope="module")
def violations() -> dict[Rule, list[str]]:
    """Return the violations of each rule in the tree, from one pass over its modules."""
    found: dict[Rule, list[str]] = {rule: [] for rule in RULES}
    for folder, rules in (("app", EVERYWHERE + IN_APP), ("tests", EVERYWHERE + IN_TESTS)):
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = Module(str(path.relative_to(ROOT)), path.read_text())
            for rule in rules:
                found[rule] += rule(module)
    return found


@pytest.mark.parametrize(("rule", "path", "source"), VIOLATIONS)
def test_the_rule_catches_a_violation(rule: Rule, path: str, source: str) -> None:
    assert list(rule(Module(path, source)))


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_lets_clean_source_pass(rule: Rule) -> None:
    assert list(rule(Module("app/core/plan/workflow.py", CLEAN))) == []


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rule(rule: Rule, violations: dict[Rule, list[str]]) -> None:
    assert violations[rule] == []


def test_every_folder_of_the_app_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "app").rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


# The import contracts, on a copy of the tree in which the planted violations cannot hurt anybody.


def _contract_modules(contracts: list[Mapping[str, Any]]) -> set[str]:
    """Every module that a contract insists on."""
    layers = {
        f"{container}.{name.strip()}"
        for contract in contracts
        for container in contract.get("containers", ())
        for layer in contract.get("layers", ())
        for name in layer.split("|")
    }
    keys = ("modules", "source_modules", "protected_modules", "allowed_importers", "forbidden_modules")
    named = {name for contract in contracts for key in keys for name in contract.get(key, ())}
    return {name for name in layers | named if name.startswith("app.") and "(" not in name}


def _copy_of_the_tree(place: Path) -> Path:
    """A copy of app/ under its contracts; a module that a contract names and nobody has written yet is empty in it."""
    shutil.copy(ROOT / "pyproject.toml", place)
    shutil.copytree(ROOT / "app", place / "app", ignore=shutil.ignore_patterns("__pycache__"))
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    names = _contract_modules(contracts)
    for name in sorted(names):
        _write_if_absent(
            place / name.replace(".", "/"), is_package=any(other.startswith(f"{name}.") for other in names)
        )
    return place


def _write_if_absent(place: Path, *, is_package: bool) -> None:
    if is_package or place.is_dir():
        place.mkdir(parents=True, exist_ok=True)
        (place / "__init__.py").touch()
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.with_suffix(".py").touch()


def _lint_imports(tree: Path) -> str:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


PLANTED: Final[tuple[tuple[str, str, str], ...]] = (
    ("core/stray.py", "import time", "core is pure"),
    ("core/stray.py", "import app.engine.runs.driver", "imports point down"),
    ("engine/calls/attempt.py", "import app.process.wiring", "imports point down"),
    ("stray.py", "", "imports point down"),
    ("core/message/chat.py", "import app.core.run.state", "imports point down inside core"),
    ("engine/calls/attempt.py", "import app.engine.steps.execution", "imports point down inside the engine"),
    ("gateway/wire/query.py", "import app.gateway.chat.request", "imports point down inside the gateway"),
    ("store/sqlkit/tables.py", "import app.store.rows.runs", "imports point down inside the store"),
    ("gateway/stray.py", "import app.process.config", "settings are read only at the door"),
    ("engine/steps/execution.py", "import app.providers.adapters.openai", "only wiring knows the implementations"),
    (
        "providers/adapters/openai.py",
        "import app.providers.adapters.anthropic",
        "implementations of a seam do not know each other",
    ),
    ("conductor/model.py", "import app.conductor.fixed", "implementations of a seam do not know each other"),
    ("audit/money.py", "import app.core.run.caller_view", "the auditor is independent of the executor"),
    ("core/plan/workflow.py", "import app.core.run.visibility", "the auditor is independent of the executor"),
    ("process/serve.py", "import app.lab.world", "the service imports neither the lab nor the auditor"),
    ("gateway/stray.py", "import app.audit.check", "the service imports neither the lab nor the auditor"),
    ("store/stray.py", "import fastapi", "the web framework stays in the gateway"),
    ("gateway/stray.py", "import sqlalchemy", "SQL stays in the store"),
    ("engine/delivery/webhooks.py", "import app.providers.http", "webhooks make plain HTTP calls and nothing else"),
    ("providers/http.py", "import aiohttp", "connections and retry policies stand in the network room alone"),
    ("stepqueue/redis.py", "import tenacity", "connections and retry policies stand in the network room alone"),
    ("network/http_client.py", "import app.providers.http", "imports point down"),
)
"""A module, the line that is planted in it, and the contract that this breaks.

Without a line, the module itself breaks it.
"""


def test_the_import_contracts_hold(tmp_path: Path) -> None:
    assert _lint_imports(_copy_of_the_tree(tmp_path)) == ""


@pytest.fixture(scope="module")
def broken_contracts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return the reports on a tree in which all violations were planted, by the contract's name."""
    tree = _copy_of_the_tree(tmp_path_factory.mktemp("planted"))
    for path, line, _ in PLANTED:
        with (tree / "app" / path).open("a") as module:
            module.write(f"\n{line}\n")
    report = _lint_imports(tree).partition("Broken contracts")[2]
    sections = re.split(r"^(\w.+)\n-{5,}$", report, flags=re.MULTILINE)[1:]
    return dict(zip(sections[::2], sections[1::2], strict=True))


@pytest.mark.parametrize(("path", "line", "contract"), PLANTED)
def test_the_contract_catches_a_violation(
    broken_contracts: Mapping[str, str], path: str, line: str, contract: str
) -> None:
    importer = f"app.{path.removesuffix('.py').replace('/', '.')}"
    imported = line.removeprefix("import ")
    wanted = f"{importer} -> {imported} (l." if imported else f"- {importer}\n"
    assert [name for name, found in broken_contracts.items() if name.startswith(contract) and wanted in found]
