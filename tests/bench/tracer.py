"""Runs one role of the service under a profiler, and counts what one request enters.

    python -P tracer.py TREE ROLE

`path` starts it with the interpreter of the tree that is measured, so it imports the standard library only, and no
module of this tree. It reads commands from its standard input, a line each: `begin` empties the counts, and after `end`
nothing more is counted. Each is answered by a line of JSON on standard output: the counts so far.
"""

from __future__ import annotations

import dis
import inspect
import json
import os
import runpy
import sys
import threading
from collections import Counter
from types import CodeType, FrameType
from typing import Any, Final

MARK: Final = "baton-path "
"""What a line of counts begins with; all other lines are the service's own."""
STEP_END: Final = "step.done"
"""The kind of the event that ends a step; it stands in the parameters of the SQL statement that writes it."""
DRIVERS: Final = ("asyncpg", "sqlalchemy", "sqlite3", "aiosqlite")
"""Libraries that are given SQL. A call of one of these by the service is where its own frames end."""
LOOPS: Final = (f"asyncio{os.sep}runners.py", f"asyncio{os.sep}base_events.py", f"{os.sep}uvloop{os.sep}")
"""Files of the event loop. The frames below it are those of the command line, the same for every task."""


class Counts:
    """The files and functions of a tree's folder `app` that all threads have entered since `begin`."""

    def __init__(self, root: str) -> None:
        self._app = os.path.join(root, "app") + os.sep
        self._store = os.path.join(self._app, "store") + os.sep
        self._providers = os.path.join(self._app, "providers") + os.sep
        self._resumes: dict[CodeType, int] = {}
        self.recording = False
        self.begin()

    def begin(self) -> None:
        """Empty the counts."""
        self.functions: set[CodeType] = set()
        self.files: Counter[str] = Counter()
        self._latest: dict[int, str] = {}
        self._clock = 0
        self._entered: dict[int, int] = {}
        self._answered = 0
        self._appending: list[FrameType] = []
        self._appended: list[str] = []
        self.frames: list[str] = []

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """The profiler's callback: entries of functions of the service, and its calls of libraries."""
        if not self.recording:
            return
        code = frame.f_code
        if event == "call":
            if code.co_filename.startswith(self._app):
                self._enter(frame, code.co_filename)
            elif frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(self._app):
                self._leave(frame.f_back, frame.f_globals.get("__name__", ""), frame)
        elif event == "c_call" and code.co_filename.startswith(self._app):
            owner = type(getattr(argument, "__self__", None))
            self._leave(frame, owner.__module__, None)

    def _enter(self, frame: FrameType, path: str) -> None:
        """A function is called, or a coroutine goes on."""
        self._clock += 1
        anew = self._is_new(frame)
        if anew:
            self._entered[id(frame)] = self._clock
        if not frame.f_code.co_name.startswith("<"):
            self.functions.add(frame.f_code)
        thread = threading.get_ident()
        if self._latest.get(thread) != path:
            self._latest[thread] = path
            self.files[path] += 1
        if path.startswith(self._providers) and not anew:
            self._answered = self._clock
        if path.startswith(self._store):
            self._append(frame)

    def _append(self, frame: FrameType) -> None:
        """Keep the deepest stack of coroutines that entered the store, from outside, since the worker's answer."""
        stack = self._find_suspended(self._after_answer(self._stack(frame)))
        outside = bool(stack) and not stack[-1].f_code.co_filename.startswith(self._store)
        if self._answered and outside and len(stack) > len(self._appending):
            self._appending = stack
            self._appended = [self._name(frame) for frame in stack]

    @staticmethod
    def _find_suspended(stack: list[FrameType]) -> list[FrameType]:
        """Return the frames that wait while the batch is written: calls by the innermost coroutine have returned by
        then."""
        while stack and not stack[0].f_code.co_flags & inspect.CO_COROUTINE:
            stack = stack[1:]
        return stack

    def _leave(self, frame: FrameType, module: str, called: FrameType | None) -> None:
        """Our `frame` calls a library, whose frame is `called` where it has one."""
        if self.frames or not self._answered or module.partition(".")[0] not in DRIVERS:
            return
        local_values = repr([entered.f_locals for entered in (frame, called) if entered is not None])
        if STEP_END in local_values:
            writing = [entered for entered in self._stack(frame) if entered not in self._appending]
            self.frames = self._appended[::-1] + [self._name(frame) for frame in writing[::-1]]

    def _is_new(self, frame: FrameType) -> bool:
        """Return whether this is a call, and not a coroutine or generator that goes on."""
        code = frame.f_code
        if code not in self._resumes:
            offsets = [
                instruction.offset for instruction in dis.get_instructions(code) if instruction.opname == "RESUME"
            ]
            self._resumes[code] = offsets[0] if offsets else 0
        return frame.f_lasti <= self._resumes[code]

    def _after_answer(self, stack: list[FrameType]) -> list[FrameType]:
        """Return the frames that were called after the worker's answer was read to its end."""
        return [frame_type for frame_type in stack if self._entered.get(id(frame_type), 0) > self._answered]

    def _stack(self, frame: FrameType | None) -> list[FrameType]:
        """Return the service's frames above the event loop, the innermost first."""
        frames = []
        while frame is not None and not any(loop in frame.f_code.co_filename for loop in LOOPS):
            if frame.f_code.co_filename.startswith(self._app):
                frames.append(frame)
            frame = frame.f_back
        return frames

    def _name(self, frame: FrameType) -> str:
        return self._describe_code(frame.f_code)

    def _describe_code(self, code: CodeType) -> str:
        return f"{code.co_filename.removeprefix(self._app)}:{code.co_qualname}"

    def to_json(self) -> str:
        """The counts as JSON."""
        return json.dumps(
            {
                "functions": sorted(self._describe_code(code) for code in list(self.functions)),
                "files": {path.removeprefix(self._app): count for path, count in list(self.files.items())},
                "frames": self.frames,
            }
        )


def obey(counts: Counts) -> None:
    """Read commands until nobody can send any more."""
    for line in sys.stdin:
        if line.strip() == "begin":
            counts.begin()
        counts.recording = line.strip() == "begin"
        print(f"{MARK}{counts.to_json()}", flush=True)


def main() -> None:
    """Start the role as `python -m app ROLE` does."""
    root, role = sys.argv[1:]
    counts = Counts(root)
    threading.Thread(target=obey, args=(counts,), daemon=True).start()
    threading.setprofile(counts.profile)
    sys.setprofile(counts.profile)
    sys.argv = ["app", role]
    runpy.run_module("app", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
