"""Points at which a process may die: boundaries, orders that name one of them, and the end itself.

A *boundary* is a moment at a seam, such as `append.before` or `stream.first`, with labels that say what passes there:
event kinds, `step=3`, `worker=beta`. An *order* names a boundary, labels that all must be there, and which of the
passings is meant. Orders lie in a file that all processes of an installation watch; the first process that passes the
boundary takes the order away and obeys it, so that every order strikes exactly one process, exactly once.

    append.after[call.intended@2]           after the intent of step 2 is committed, before anybody hears of it
    stream.before[worker=poison]:3          when this process is about to call that worker for the third time
    take.after                              as soon as a process has taken a ticket

How it ends: `kill` (SIGKILL, the default), `stop` (SIGSTOP: it freezes and may be thawed), or `raise`, which throws an
exception that nobody expects at that point. An order that begins with `*` stays where it is, and strikes every process.
"""

import json
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import Struct

FORM: Final = re.compile(r"(?P<how>(kill|stop|raise) )?(?P<at>[a-z.]+)(\[(?P<labels>[^]]*)\])?(:(?P<n>\d+))?")
TAKEN: Final = ".taken"


class InjectedError(RuntimeError):
    """The error that an order to `raise` throws."""


class Order(Struct, frozen=True):
    """One boundary, and what happens there."""

    at: str
    labels: frozenset[str] = frozenset()
    n: int = 1
    how: str = "kill"
    stays: bool = False

    @classmethod
    def read(cls, text: str) -> "Order":
        """From its written form; raises ValueError."""
        match = FORM.fullmatch(text.strip().removeprefix("*").strip())
        if match is None:
            raise ValueError(f"not an order: {text!r}")
        labels = frozenset(word.strip() for word in (match["labels"] or "").split(",")) - {""}
        how = (match["how"] or "kill").strip()
        return cls(match["at"], labels, int(match["n"] or 1), how, text.strip().startswith("*"))

    def context(self, at: str, labels: frozenset[str]) -> bool:
        """Return whether this passing counts."""
        return at == self.at and self.labels <= labels


@dataclass(slots=True)
class CrashPoints:
    """The orders that this process lives under: one of its own from the command line, and one in a watched file."""

    own: Order | None = None
    watched: Path | None = None
    _seen: int = 0
    _text: str = ""
    _mark: int = 0

    def pass_by(self, at: str, *labels: str) -> None:
        """Say that this process passes a boundary; it may well not return."""
        all_labels = frozenset(labels)
        if self.own is not None and self.own.context(at, all_labels):
            self._seen += 1
            if self._seen == self.own.n:
                _end(self.own)
        if self.watched is not None:
            self._obey(self.watched, at, all_labels)

    def _obey(self, path: Path, at: str, labels: frozenset[str]) -> None:
        try:
            mark = path.stat().st_mtime_ns
            text = path.read_text() if mark != self._mark else self._text
        except FileNotFoundError:
            return
        if mark != self._mark:
            self._mark, self._text, self._seen = mark, text, 0
        order = Order.read(text)
        if not order.context(at, labels):
            return
        self._seen += 1
        if self._seen < order.n:
            return
        report = json.dumps({"pid": os.getpid(), "at": time.time(), "boundary": at, "labels": sorted(labels)})
        if order.stays:
            with path.with_suffix(TAKEN).open("a") as file:
                file.write(report + "\n")
            _end(order)
        with suppress(FileNotFoundError):  # somebody else was faster
            draft = path.with_suffix(f".{os.getpid()}")
            path.rename(draft)
            draft.write_text(report + "\n")
            draft.rename(path.with_suffix(TAKEN))
            _end(order)


def _end(order: Order) -> None:
    if order.how == "raise":
        raise InjectedError(f"struck at {order.at}")
    os.kill(os.getpid(), signal.SIGKILL if order.how == "kill" else signal.SIGSTOP)


class ObeyedOrder(Struct, frozen=True):
    """An order that was obeyed: by whom, and when (seconds since 1970)."""

    pid: int
    at: float
    boundary: str
    labels: tuple[str, ...] = ()


class Orders(Struct, frozen=True):
    """The test's side of the watched file."""

    path: Path

    def lay(self, order: str) -> None:
        """Give an order in its written form; an older one is withdrawn."""
        Order.read(order)
        self.withdraw()
        draft = self.path.with_suffix(".draft")
        draft.write_text(order)
        draft.rename(self.path)

    def withdraw(self) -> None:
        """Nobody is to die any more."""
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(TAKEN).unlink(missing_ok=True)

    @property
    def obeyed_orders(self) -> list[ObeyedOrder]:
        """Return the orders that were obeyed, in the order of their times."""
        with suppress(FileNotFoundError):
            lines = self.path.with_suffix(TAKEN).read_text().splitlines()
            return [ObeyedOrder(**{**json.loads(text), "labels": tuple(json.loads(text)["labels"])}) for text in lines]
        return []
