"""Where code from an answer is run: a process of its own behind the walls that `sandbox_child.py` builds.

It gets an empty environment and an empty folder, is ended when its time is up, and what it prints is thrown away. By
default nothing is run where the kernel does not let us cut the network off.
"""

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from app.errors import ConfigInvalid
from app.lab.grading import Grader

GRACE = 5.0
"""Seconds that the cell itself gets beside the code that it runs."""
MOST_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Verdict:
    """`said` is `passed`, or in a few words why not; `walls` are those of network, processes, files that stood."""

    said: str
    walls: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all tests did."""
        return self.said == "passed"


@dataclass(frozen=True, slots=True)
class Sandbox:
    """`trusts`: run the code even where the network cannot be cut off."""

    trusts: bool = False

    def execute(self, code: str, tests: str, seconds: float) -> Verdict:
        """Run the code, then the tests in the same namespace. Never raises for what they do."""
        token = secrets.token_hex(16)
        asked = {"code": code, "tests": tests, "seconds": seconds, "token": token, "walled": not self.trusts}
        with tempfile.TemporaryDirectory(prefix="baton-cell-") as folder:
            told = _ran(json.dumps(asked).encode(), folder, seconds + GRACE)
        try:
            reply = json.loads(told)
            if reply.pop("token") == token:
                return Verdict(str(reply["verdict"]), tuple(reply["walls"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        return Verdict("died")

    def run(self, code: str, tests: str, seconds: float) -> str | None:
        """As a grader wants it: None for passed, else why not."""
        verdict = self.execute(code, tests, seconds)
        return None if verdict.passed else verdict.said

    def ready(self, graders: Iterable[Grader]) -> tuple[str, ...]:
        """The walls behind which these graders run code, if any of them does; `ConfigInvalid` where it must not: a
        refusal is no verdict on an answer."""
        if not any(grader.kind == "tests" for grader in graders):
            return ()
        walls = self.standing()
        if "network" not in walls and not self.trusts:
            raise ConfigInvalid(
                [
                    "unit tests run code from answers, and this kernel does not let its network be cut off; use a "
                    "machine that has nothing to lose, and say --trust-code"
                ]
            )
        return walls or ("nothing",)

    def standing(self) -> tuple[str, ...]:
        """The walls that there are on this machine; without that of the network, code is run only if it is trusted."""
        return Sandbox(trusts=True).execute("", "", 5.0).walls


def _ran(asked: bytes, folder: str, seconds: float) -> bytes:
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
            return process.communicate(asked, seconds)[0][:MOST_BYTES]
        except subprocess.TimeoutExpired:
            process.kill()
            return b""
