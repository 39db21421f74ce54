"""Code from answers behind walls: what passes, what fails, and what it cannot reach."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.learning import sandbox_child
from app.cli.learning.sandbox import Sandbox
from tests.harness.waiting import PATIENCE_SECONDS

CASE = "import unittest\nclass Sums(unittest.TestCase):\n    def test_it(self):\n        "
WRONG = "def double(x):\n    return 0\n"
DOUBLE = "def double(x):\n    return 2 * x\n"


KERNEL = """
import ctypes
libc = ctypes.CDLL(None)
print("files" * (libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)) > 0))
print("network" * (libc.unshare(0x50000000) == 0))
"""
"""What this machine's kernel would give any process: Landlock; user and network namespaces."""


@pytest.fixture(scope="module")
def walls() -> tuple[str, ...]:
    result = subprocess.run([sys.executable, "-c", KERNEL], capture_output=True, text=True, check=True).stdout.split()
    if "network" not in result:
        pytest.skip("this kernel has no namespaces for us")
    commands = Sandbox().isolations()
    assert set(commands) == {*result, "processes"}
    return commands


@pytest.mark.parametrize(
    ("code", "tests", "verdict"),
    [
        (DOUBLE, "assert double(2) == 4", "passed"),
        (DOUBLE, "def test_it():\n    assert double(2) == 5", "a test fails"),
        (
            DOUBLE,
            "from unittest import TestCase\nclass T(TestCase):\n    def test_it(self):\n        assert double(2) == 5",
            "a test fails",
        ),
        (DOUBLE, "async def test_it():\n    assert double(2) == 4", "passed"),
        (DOUBLE, "async def test_it():\n    assert double(2) == 5", "a test fails"),
        ("def double(x: return", "", "raises SyntaxError"),
        ("import os\nos._exit(0)", "assert False", "died"),
        ("class Odd(Exception): pass\nraise Odd('words of the answer')", "", "raises an error of its own"),
        ("while True: pass", "", "time is up"),
        ("x = bytearray(4 << 30)", "", "raises MemoryError"),
        ("open('large', 'wb').write(bytes(17 << 20))", "", "raises OSError"),
        ("held = [open('own%d' % n, 'w') for n in range(80)]", "", "raises OSError"),
    ],
)
@pytest.mark.long
def test_the_verdict(walls: tuple[str, ...], code: str, tests: str, verdict: str) -> None:
    seconds = PATIENCE_SECONDS
    if verdict == "time is up":
        seconds = 0.4
    assert Sandbox().execute(code, tests, seconds).text == verdict


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def test_it():\n    pass\n", "def test_it():\n    assert double(2) == 4"),
        (f"{CASE}pass\n", f"{CASE}assert double(2) == 4"),
        ("", "async def test_it():\n    assert double(2) == 4"),
        ("", "class TestIt:\n    def test_it(self):\n        assert double(2) == 4"),
        ("", "class TestIt:\n    async def test_it(self):\n        assert double(2) == 4"),
        (
            "",
            "class TestIt:\n    def setup_method(self):\n        self.four = 4\n"
            "    def test_it(self):\n        assert double(2) == self.four",
        ),
    ],
)
def test_every_test_is_run_whatever_its_form_and_the_names_of_the_answer(code: str, tests: str) -> None:
    assert sandbox_child._verdict(DOUBLE + code, tests) == "passed"
    assert sandbox_child._verdict(WRONG + code, tests) == "a test fails"


def test_the_network_other_processes_and_files_are_out_of_reach(walls: tuple[str, ...], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    code = f"""
import os, socket
assert not [name for name in os.environ if name != "LC_CTYPE"]
assert [name for _, name in socket.if_nameindex()] in ([], ["lo"])
assert os.getpid() == 1 and os.getppid() == 0
open("own", "w").write("x")
try:
    open({str(secret)!r}).read()
    seen = True
except OSError:
    seen = False
"""
    tests = "assert not seen" if "files" in walls else "assert seen"
    assert Sandbox().execute(code, tests, 5.0).text == "passed"


def test_nothing_is_run_where_the_network_cannot_be_cut_off() -> None:
    """The program is refused where there is no `unshare`."""
    blind = "import ctypes, runpy, sys; ctypes.CDLL = lambda *_, **__: object(); "
    shim = blind + "runpy.run_path(sys.argv[1], run_name='__main__')"
    task = {"code": "", "tests": "", "seconds": 1, "token": "t", "walled": True}
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", shim, str(Path(sandbox_child.__file__))],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert json.loads(result.stdout) == {"token": "t", "verdict": "no sandbox", "walls": []}
