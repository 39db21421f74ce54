"""The program inside the sandbox, started by `sandbox.py`, which runs an answer and its tests.

It reads one JSON object, isolates itself as far as the kernel allows, and lets a child run the code: no network, no
view of other processes, no files but the standard library and its own folder, no new processes, bounded time and
memory. It prints the verdict in one line with a token that the child does not know.
"""

import asyncio
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
import unittest
from collections.abc import Callable, Coroutine
from typing import Any

NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x08000000
"""Linux namespaces: user, network, processes, and messages between processes."""
USER = 0x10000000
READ_RIGHTS, DEVICE_RIGHTS = 1 | 4 | 8, 2 | 4
"""Rights of Landlock: execute, read files and list folders; write and read a file."""
SHARED = ("/usr/lib", "/lib", "/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
MISSING = object()
MEMORY, FILE_BYTES, OPEN_FILES = 1 << 30, 16 << 20, 64


def main() -> None:
    """Run the code that standard input has."""
    request = json.loads(sys.stdin.read())
    out = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    walls = _isolate()
    if request["walled"] and "network" not in walls:
        return _say(out, request["token"], "no sandbox", walls)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(out)
        os.close(reading)
        _child(request, writing)
    os.close(writing)
    verdict = _wait(child, reading, request["seconds"])
    files, _, text = verdict.partition(":")
    if files == "files":
        walls.append(files)
    _say(out, request["token"], text, walls)


def _say(out: int, token: str, verdict: str, walls: list[str]) -> None:
    os.write(out, json.dumps({"token": token, "verdict": verdict, "walls": walls}).encode())


def _isolate() -> list[str]:
    """Leave the network and the processes of this machine, as far as the kernel allows."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        return []
    if libc.unshare(NAMESPACES) == 0 or libc.unshare(NAMESPACES & ~USER) == 0:
        return ["network", "processes"]
    return []


def _wait(child: int, reading: int, seconds: float) -> str:
    """Return the child's verdict. It is the first process of its namespace, so that no process outlives it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return os.read(reading, 200).decode("utf-8", "replace") or ":died"
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return ":time is up"


def _child(request: dict[str, Any], writing: int) -> None:
    limits = {
        resource.RLIMIT_CPU: int(request["seconds"]) + 1,
        resource.RLIMIT_AS: MEMORY,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    files = ""
    if _restrict_files(os.getcwd()):
        files = "files"
    verdict = _verdict(request["code"], request["tests"])
    os.write(writing, f"{files}:{verdict}".encode())
    os._exit(0)


def _verdict(code: str, tests: str) -> str:
    space: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(compile(code, "answer.py", "exec"), space)
        answer_space = dict(space)
        exec(compile(tests, "tests.py", "exec"), space)
        # A test counts as the tests' own also where the answer has defined the same name before.
        return _run_tests([value for name, value in space.items() if answer_space.get(name, MISSING) is not value])
    except AssertionError:
        return "a test fails"
    except BaseException as error:
        builtin = type(error).__module__ == "builtins"
        if not builtin:
            return "raises an error of its own"
        return f"raises {type(error).__name__}"


def _run_tests(items: list[Any]) -> str:
    """Run functions named `test...`, test cases, and classes named `Test...`; bare assertions have run already."""
    for item in items:
        if isinstance(item, type) and issubclass(item, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(item).run(result)
            if not result.wasSuccessful():
                return "a test fails"
        elif isinstance(item, type) and item.__name__.startswith("Test"):
            _run_class(item)
        elif callable(item) and getattr(item, "__name__", "").startswith("test"):
            _call(item)
    return "passed"


def _run_class(tests: type) -> None:
    """Run each method named `test...` on an object of its own, as pytest does."""
    for name in dir(tests):
        if name.startswith("test"):
            held = tests()
            if hasattr(held, "setup_method"):
                held.setup_method()
            _call(getattr(held, name))


def _call(test: Callable[[], Any]) -> None:
    """Call a test, and await it if it is a coroutine."""
    result = test()
    if isinstance(result, Coroutine):
        asyncio.run(result)


def _restrict_files(home: str) -> bool:
    """Restrict this process and its children by Landlock to the paths that are named here."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = -1
    if sys.platform == "linux":
        version = libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return False
    every = (1 << {1: 13, 2: 14}.get(version, 15 if version < 5 else 16)) - 1
    fields = [every, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    rules = libc.syscall(444, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if rules < 0:
        return False
    rights = {os.path.dirname(os.__file__): READ_RIGHTS, **dict.fromkeys(SHARED, READ_RIGHTS), home: every}
    for path, access in {**rights, "/dev/null": DEVICE_RIGHTS, "/dev/urandom": 4}.items():
        _allow(libc, rules, path, access & every)
    libc.prctl(38, 1, 0, 0, 0)
    return bool(libc.syscall(446, rules, ctypes.c_uint32(0)) == 0)


def _allow(libc: ctypes.CDLL, rules: int, path: str, access: int) -> None:
    try:
        place = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
    except OSError:
        return
    libc.syscall(445, rules, 1, struct.pack("=Qi", access, place), ctypes.c_uint32(0))
    os.close(place)


if __name__ == "__main__":
    main()
