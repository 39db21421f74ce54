"""Sees every commit as the database made it, through triggers, and objects at once to what no commit may do.

It knows the tables and nothing of the code that writes them. What must hold at each commit is checked here; what must
hold in the end, in `oracle.py`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

TRIGGERS = """
CREATE TABLE witness (n INTEGER PRIMARY KEY, what TEXT, run TEXT, seq INTEGER, kind TEXT, body BLOB, who TEXT);
CREATE TABLE buried (run TEXT, ref TEXT, body BLOB);
CREATE TRIGGER saw_burial AFTER DELETE ON contents BEGIN
    INSERT INTO buried (run, ref, body) VALUES (OLD.run, OLD.ref, OLD.body); END;
CREATE TRIGGER saw_run AFTER INSERT ON runs BEGIN
    INSERT INTO witness (what, run, seq, body, who) VALUES ('run', NEW.id, NEW.epoch, NEW.salt, NEW.driver); END;
CREATE TRIGGER saw_change AFTER UPDATE ON runs BEGIN
    INSERT INTO witness (what, run, seq, who)
    VALUES ('driver', NEW.id, NEW.epoch, COALESCE(NULLIF(NEW.driver, ''), OLD.driver)); END;
CREATE TRIGGER saw_debt AFTER UPDATE ON runs
    WHEN NEW.held_usd + NEW.spent_usd > NEW.cap_usd OR NEW.held_tokens + NEW.spent_tokens > NEW.cap_tokens
    OR NEW.held_usd < 0 OR NEW.held_tokens < 0 BEGIN
    INSERT INTO witness (what, run) VALUES ('debt', NEW.id); END;
CREATE TRIGGER saw_event AFTER INSERT ON events BEGIN
    INSERT INTO witness (what, run, seq, kind, body) VALUES ('event', NEW.run, NEW.seq, NEW.kind, NEW.body); END;
CREATE TRIGGER saw_rewriting AFTER UPDATE ON events BEGIN
    INSERT INTO witness (what, run, seq) VALUES ('rewritten', NEW.run, NEW.seq); END;
CREATE TRIGGER saw_deletion AFTER DELETE ON events BEGIN
    INSERT INTO witness (what, run, seq) VALUES ('rewritten', OLD.run, OLD.seq); END;
CREATE TRIGGER saw_new_ticket AFTER INSERT ON tickets WHEN NEW.holder IS NOT NULL BEGIN
    INSERT INTO witness (what, run, seq, who) VALUES ('ticket', NEW.run, NEW.step, NEW.holder); END;
CREATE TRIGGER saw_ticket AFTER UPDATE ON tickets BEGIN
    INSERT INTO witness (what, run, seq, who)
    VALUES ('ticket', NEW.run, NEW.step, COALESCE(NEW.holder, OLD.holder)); END;
CREATE TRIGGER saw_ticket_end AFTER DELETE ON tickets BEGIN
    INSERT INTO witness (what, run, seq, who) VALUES ('ticket', OLD.run, OLD.step, OLD.holder); END;
"""
DRIVERS_WORDS = frozenset(
    {
        *("plan.opened", "plan.step", "plan.accepted", "plan.rejected", "step.queued", "step.skipped"),
        *("run.awaiting_tool", "run.resumed", "step.tool_results"),
    }
)
OPENS = "@conductor"
"""The worker of a step that its driver settles, with what is nested in it."""
ENDINGS = frozenset({"run.succeeded", "run.failed", "run.cancelled", "run.expired", "run.over_budget"})
MONEY = "held_usd, held_tokens, spent_usd, spent_tokens"
DISPATCHERS_WORDS = frozenset({"call.intended", "call.finished", "step.done", "step.failed", "step.awaiting_tool"})


@dataclass(frozen=True, slots=True)
class Fact:
    """One event as it was committed: by which process, and when in the world's time."""

    run: str
    seq: int
    kind: str
    body: dict[str, Any]
    author: str
    at: float


@dataclass
class Books:
    """What a run's row must say of its money, by its journal: what is held for which call, and what is spent."""

    held: dict[str, tuple[int, int]] = field(default_factory=dict)
    usd: int = 0
    tokens: int = 0

    def enter(self, fact: Fact) -> None:
        """An intent holds, its outcome spends."""
        body = fact.body
        if fact.kind == "call.intended":
            self.held[body["call"]] = body["usd_held"], body["tokens_held"]
        elif fact.kind == "call.finished":
            self.held.pop(body["call"], None)
            self.usd += body["usd"]
            self.tokens += body["usage"]["input"] + body["usage"]["output"]

    @property
    def row(self) -> tuple[int, int, int, int]:
        """In the order of `MONEY`."""
        usd, tokens = (sum(part) for part in zip(*self.held.values(), strict=True)) if self.held else (0, 0)
        return usd, tokens, self.usd, self.tokens


@dataclass
class Witness:
    """All commits of a world. `objections` is what was wrong."""

    time: Callable[[], float]
    note: Callable[..., None]
    objections: list[str] = field(default_factory=list)
    facts: dict[str, list[Fact]] = field(default_factory=dict)
    salts: dict[str, bytes] = field(default_factory=dict)
    intents: Counter[str] = field(default_factory=Counter)
    """How many intents were committed with this request hash."""
    books: dict[str, Books] = field(default_factory=dict)
    openers: set[tuple[str, int]] = field(default_factory=set)
    """Steps that the conductor takes itself."""

    def object(self, sentence: str) -> None:
        """Something is wrong."""
        self.objections.append(sentence)

    def committed(self, author: str, rows: Callable[..., list[tuple[Any, ...]]]) -> None:
        """Read what the transaction that has just been committed did."""
        found = rows("SELECT what, run, seq, kind, body, who FROM witness ORDER BY n")
        if not found:
            return
        rows("DELETE FROM witness")
        settling = set()
        drivers = {run: who for what, run, _, _, _, who in found if what in ("run", "driver")}
        holders = {(run, seq): who for what, run, seq, _, _, who in found if what == "ticket"}
        for what, run, seq, kind, body, _ in found:
            if what == "run":
                self.salts[run] = body
            elif what == "event":
                fact = Fact(run, seq, kind, orjson.loads(body), author, self.time())
                self._take(fact)
                self._check_author(fact, drivers.get(run), holders.get((run, fact.body.get("n"))))
                if kind in ("call.intended", "call.finished"):
                    settling.add(run)
            elif what == "debt":
                self.object(f"{run}: held and spent pass the cap, or less than nothing is held")
            elif what == "rewritten":
                self.object(f"{run}: event {seq} was changed after its commit")
        for run in sorted(settling):
            row, books = rows(f"SELECT {MONEY} FROM runs WHERE id = ?", run)[0], self.books[run].row
            if row != books:
                self.object(f"{run}: its row has {MONEY} as {row}, its calls as {books}")

    def _take(self, fact: Fact) -> None:
        self.facts.setdefault(fact.run, []).append(fact)
        self.note(fact.author, fact.run, fact.seq, fact.kind, fact.body)
        self.books.setdefault(fact.run, Books()).enter(fact)
        if fact.kind == "call.intended":
            self.intents[fact.body["request"]] += 1
        elif fact.kind == "plan.step" and fact.body["worker"] == OPENS:
            self.openers.add((fact.run, fact.body["n"]))

    def _check_author(self, fact: Fact, driver: str | None, holder: str | None) -> None:
        """A run is written by the driver of its row, a step by the holder of its ticket, as they are at this commit."""
        drives = fact.kind in DRIVERS_WORDS or fact.kind in ENDINGS
        if drives and fact.author != driver:
            self.object(f"{fact.run}: {fact.author} wrote {fact.kind}, but {driver} drives the run")
        if fact.kind in DISPATCHERS_WORDS:
            n = fact.body.get("n")
            of_driver = n is None or (fact.run, n) in self.openers
            owner, title = (driver, "drives the run") if of_driver else (holder, "holds the ticket")
            if fact.author != owner:
                self.object(f"{fact.run}: {fact.author} wrote {fact.kind}, but {owner} {title}")

    def intent_of(self, body: bytes, made: Mapping[str, int]) -> tuple[str, str] | None:
        """The run and the hash of a committed intent with exactly these bytes: one for which no call was `made` yet, if
        there is one, since a conversation that goes on and one that begins anew may be asked in the same words."""
        digests = ((run, hashlib.sha256(salt + body).hexdigest()) for run, salt in self.salts.items())
        found = [(run, digest) for run, digest in digests if digest in self.intents]
        return next((one for one in found if made.get(one[1], 0) < self.intents[one[1]]), found[0] if found else None)
