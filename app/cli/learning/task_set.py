"""Task sets: files of JSON lines, each a task with its grader. All faults are reported together, with their lines.

{"id": "1", "question": "What is 2 + 2?", "grader": {"kind": "numeric", "expected": 4}}
{"messages": [{"role": "system", "content": "Be brief."}, ...], "grader": {...}, "family": "sums"}
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from msgspec import Struct

from app.errors import ConfigInvalid
from app.lab import grading
from app.lab.grading import Execute, Grader

ROLES = ("system", "developer", "user", "assistant")


class GradedTask(Struct, frozen=True):
    """A task: its id (by default its line number), its messages, and the grader of its answer."""

    id: str
    messages: tuple[Mapping[str, str], ...]
    grader: Grader
    grader_text: str
    """The grader as JSON with sorted keys."""
    family: str = ""
    """The kind of task, where the line names one."""

    @property
    def question(self) -> str:
        """Return the user's last message."""
        return next(message["content"] for message in reversed(self.messages) if message["role"] == "user")


def read(path: Path, execute: Execute | None, faults: list[str]) -> list[GradedTask]:
    """Read the tasks of a file, and add its faults to `faults`."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # editors of Windows write a byte order mark
    except (OSError, UnicodeDecodeError):
        faults.append(f"{path}: cannot be read; name a file of JSON lines")
        return []
    return parse(lines, str(path), execute, faults)


def parse(lines: Sequence[str], source: str, execute: Execute | None, faults: list[str]) -> list[GradedTask]:
    """Read the tasks of a file's lines, and add their faults to `faults`; a file without a task is one."""
    tasks: list[GradedTask] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            tasks += _task(line, f"{source}:{number}", str(number), execute, faults)
    if not tasks and not faults:
        faults.append(f"{source}: there is no task in it; write one on each line")
    return tasks


def require_valid(make: Callable[[list[str]], list[GradedTask]]) -> list[GradedTask]:
    """Return the tasks that `make` reads. Raises `ConfigInvalid` with every fault."""
    faults: list[str] = []
    tasks = make(faults)
    counts = Counter([task.id for task in tasks])
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        faults.append(f"several tasks have the id {twice[0][:40]}; give each its own, or leave all ids out")
    if faults:
        raise ConfigInvalid(faults)
    return tasks


def digest(tasks: Sequence[GradedTask]) -> str:
    """Return the SHA-256 of tasks and graders, in the file's order. Rows with another digest are not comparable."""
    whole = [[task.id, list(map(dict, task.messages)), task.grader_text] for task in tasks]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def rule(text: str, place: str, execute: Execute | None, faults: list[str]) -> Iterator[tuple[Grader, str]]:
    """Yield a grader that is given as JSON, with its canonical text, or add its faults to `faults`."""
    for spec in _json(text, place, faults):
        yield from _grader(spec, place, execute, faults)


def _json(text: str, place: str, faults: list[str]) -> Iterator[Any]:
    """Yield what JSON says, or add its fault to `faults`, such as half a pair of surrogates, which cannot be sent."""
    try:
        yield orjson.loads(text)
    except orjson.JSONDecodeError as error:
        faults.append(f"{place}: is not JSON: {error}; correct it")


def _grader(spec: object, place: str, execute: Execute | None, faults: list[str]) -> Iterator[tuple[Grader, str]]:
    try:
        yield grading.grader(spec, execute), json.dumps(spec, sort_keys=True)
    except ValueError as error:
        faults.append(f"{place}: {error}")


def _task(line: str, place: str, number: str, execute: Execute | None, faults: list[str]) -> Iterator[GradedTask]:
    for task in _json(line, place, faults):
        messages, name = None, None
        if isinstance(task, dict):
            messages, name = _messages(task), task.get("id", number)
        if messages is None or not isinstance(name, str | int):
            faults.append(f'{place}: is no task; write {{"question": "...", "grader": {{...}}}}')
            return
        family = task.get("family", "")
        if not isinstance(family, str):
            family = ""
        for grader, grader_text in _grader(task.get("grader"), place, execute, faults):
            yield GradedTask(str(name), messages, grader, grader_text, family)


def _messages(task: Mapping[str, Any]) -> tuple[Mapping[str, str], ...] | None:
    """Return `messages` in the API's form (texts only), or `question` as a user's message; None where neither asks
    anything."""
    messages = task.get("messages")
    if "question" in task and messages is None:
        messages = [{"role": "user", "content": task["question"]}]
    elif "question" in task or not isinstance(messages, list):
        return None
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"} or message["role"] not in ROLES:
            return None
        if not isinstance(message["content"], str):
            return None
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        return None
    return tuple(messages)
