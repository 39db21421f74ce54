"""The sandbox for code from answers: a process that `sandbox_child.py` isolates.

It gets an empty environment and an empty folder, is killed when its time is up, and its output is discarded. By default
nothing is run if the kernel does not allow its network to be cut off.
"""

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from app.errors import ConfigInvalid
from app.lab.grading import Grader

GRACE_SECONDS = 5.0
"""Seconds that the sandbox gets in addition to the code that it runs."""
MAX_OUTPUT_BYTES = 4_096


class Verdict(Struct, frozen=True):
    """The result: `text` is `passed` or a short reason; `walls` are the isolations in force (network, processes,
    files)."""

    text: str
    walls: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Return True if all tests passed."""
        return self.text == "passed"


class Sandbox(Struct, frozen=True):
    """Runs code from answers. With `trusts` it does so even if the network cannot be cut off."""

    trusts: bool = False

    def execute(self, code: str, tests: str, seconds: float) -> Verdict:
        """Run the code, then the tests in the same namespace. Errors in either are part of the verdict."""
        token = secrets.token_hex(16)
        request = {"code": code, "tests": tests, "seconds": seconds, "token": token, "walled": not self.trusts}
        with tempfile.TemporaryDirectory(prefix="baton-cell-") as folder:
            output = _output(json.dumps(request).encode(), folder, seconds + GRACE_SECONDS)
        try:
            reply = json.loads(output)
            if reply.pop("token") == token:
                return Verdict(str(reply["verdict"]), tuple(reply["walls"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        return Verdict("died")

    def run(self, code: str, tests: str, seconds: float) -> str | None:
        """Run code and tests for a grader. Returns None if they passed, else the reason."""
        verdict = self.execute(code, tests, seconds)
        if verdict.passed:
            return None
        return verdict.text

    def require_isolation(self, graders: Iterable[Grader]) -> tuple[str, ...]:
        """Return the isolations under which these graders run code, or nothing if none of them does.

        Raises `ConfigInvalid` if code must not be run here, because a refusal is no verdict on an answer.
        """
        if not any(grader.kind == "tests" for grader in graders):
            return ()
        walls = self.isolations()
        if "network" not in walls and not self.trusts:
            raise ConfigInvalid(
                [
                    "unit tests run code from answers, and this kernel does not allow its network to be cut off; use a "
                    "machine that has nothing to lose, and add --trust-code"
                ]
            )
        return walls or ("nothing",)

    def isolations(self) -> tuple[str, ...]:
        """Return the isolations that this machine offers. If it lacks `network`, only trusted code may run."""
        return Sandbox(trusts=True).execute("", "", 5.0).walls


def _output(request: bytes, folder: str, seconds: float) -> bytes:
    cell = Path(__file__).with_name("sandbox_child.py")
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(cell)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={},
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(request, seconds)[0][:MAX_OUTPUT_BYTES]
        except subprocess.TimeoutExpired:
            process.kill()
            return b""
