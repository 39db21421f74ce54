"""Sees every commit as the database made it, through triggers, and objects at once to what no commit may do.

It knows the tables and nothing of the code that writes them. What must hold at each commit is checked here; what must
hold in the end, in `oracle.py`.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from msgspec import Struct

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
CREATE TRIGGER saw_lease AFTER UPDATE OF lease_until ON runs
    WHEN NEW.epoch = OLD.epoch AND NEW.driver <> '' AND NEW.lease_until NOT BETWEEN OLD.lease_until - 0.4
    AND OLD.lease_until BEGIN
    INSERT INTO witness (what, run, seq, body, who)
    VALUES (CASE WHEN NEW.lease_until < OLD.lease_until THEN 'lowered' ELSE 'raised' END, NEW.id, NEW.epoch,
    NEW.lease_until, NEW.driver); END;
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
    INSERT INTO witness (what, run, seq, who) VALUES ('finished', OLD.run, OLD.step, OLD.holder); END;
"""
DRIVERS_WORDS = frozenset(
    {
        *("plan.opened", "plan.step", "plan.accepted", "plan.rejected", "step.queued", "step.skipped"),
        *("run.awaiting_tool", "run.resumed", "step.tool_results"),
        *("run.awaiting_approval", "run.approval_expired"),
    }
)
GATEWAYS_WORDS = frozenset({"run.resumed", "step.tool_results"})
"""The words with which a gateway begins a turn of a run that nobody drives."""
OPENS = "@conductor"
"""The worker of a step that its driver settles, with what is nested in it."""
ENDINGS = frozenset({"run.succeeded", "run.failed", "run.cancelled", "run.expired", "run.over_budget"})
IN_FLIGHT = 2
"""Entries that were on their way when a run was given up, at most: its driver's, and a planning call's."""
OVERTAKEN = 5.0
"""Seconds for which a renewal may be on its way to the database while the run that it prolongs is given up."""
MONEY = "held_usd, held_tokens, spent_usd, spent_tokens"
DISPATCHERS_WORDS = frozenset({"call.intended", "call.finished", "step.done", "step.failed", "step.awaiting_tool"})


class Fact(Struct, frozen=True):
    """One event as it was committed: by which process, and when in the world's time."""

    run: str
    seq: int
    kind: str
    body: dict[str, Any]
    author: str
    at: float


@dataclass
class Gift:
    """A run that its driver has left to others under this epoch: since when, and who took it up and when."""

    run: str
    epoch: int
    giver: str
    at: float
    taker: str = ""
    taken_at: float = math.inf
    written: set[float] = field(default_factory=set)
    """When its giver still wrote in it meanwhile."""


@dataclass
class ExpectedMoney:
    """The money that a run's row must show by its journal: what is reserved for each call, and what is spent."""

    reservations: dict[str, tuple[int, int]] = field(default_factory=dict)
    usd: int = 0
    tokens: int = 0

    def enter(self, fact: Fact) -> None:
        """An intent holds, its outcome spends."""
        body = fact.body
        if fact.kind == "call.intended":
            self.reservations[body["call"]] = body["usd_held"], body["tokens_held"]
        elif fact.kind == "call.finished":
            self.reservations.pop(body["call"], None)
            self.usd += body["usd"]
            self.tokens += body["usage"]["input"] + body["usage"]["output"]

    @property
    def row(self) -> tuple[int, int, int, int]:
        """In the order of `MONEY`."""
        usd, tokens = (
            (sum(part) for part in zip(*self.reservations.values(), strict=True)) if self.reservations else (0, 0)
        )
        return usd, tokens, self.usd, self.tokens


@dataclass
class Witness:
    """All commits of a world. `objections` is what was wrong."""

    time: Callable[[], float]
    note: Callable[..., None]
    asked: Callable[["Fact"], None]
    """It is told of each plan that waits for an approval."""
    objections: list[str] = field(default_factory=list)
    facts: dict[str, list[Fact]] = field(default_factory=dict)
    salts: dict[str, bytes] = field(default_factory=dict)
    intents: Counter[str] = field(default_factory=Counter)
    """How many intents were committed with this request hash."""
    expected_money: dict[str, ExpectedMoney] = field(default_factory=dict)
    gifts: list[Gift] = field(default_factory=list)
    giving: set[tuple[str, str]] = field(default_factory=set)
    """Drivers and the runs that they mean to give up: a renewal that comes late looks the same."""
    openers: set[tuple[str, int]] = field(default_factory=set)
    """Steps that the conductor takes itself."""

    _leads: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Who drives each run, under which epoch."""
    _refused: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Who wrote the refusal of a plan, and when, by run."""
    _free: dict[str, Gift] = field(default_factory=dict)
    """By run, those that nobody has taken up."""

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
        leads = _leads(found, author)
        self._check_epochs(leads)
        holders = {(run, seq): who for what, run, seq, _, _, who in found if what in ("ticket", "finished")}
        for what, run, seq, kind, body, who in found:
            if what == "run":
                self.salts[run] = body
            elif what in ("driver", "lowered", "raised"):
                self._see_driver(what, run, seq, who)
            elif what == "event":
                fact = Fact(run, seq, kind, orjson.loads(body), author, self.time())
                self._take(fact)
                driver = leads.get(run, ("", 0))[0]
                self._check_author(fact, driver, holders.get((run, fact.body.get("n"))))
                if kind in ("call.intended", "call.finished"):
                    settling.add(run)
            elif what == "debt":
                self.object(f"{run}: held and spent pass the cap, or less than nothing is held")
            elif what == "rewritten":
                self.object(f"{run}: event {seq} was changed after its commit")
        for run in sorted(settling):
            self._check_books(run, rows(f"SELECT {MONEY} FROM runs WHERE id = ?", run)[0])

    def _check_books(self, run: str, row: tuple[int, ...]) -> None:
        if row != (expected_money := self.expected_money[run].row):
            self.object(f"{run}: its row has {MONEY} as {row}, its calls as {expected_money}")

    def _take(self, fact: Fact) -> None:
        self.facts.setdefault(fact.run, []).append(fact)
        self.note(fact.author, fact.run, fact.seq, fact.kind, fact.body)
        self.expected_money.setdefault(fact.run, ExpectedMoney()).enter(fact)
        if fact.kind == "call.intended":
            self.intents[fact.body["request"]] += 1
        elif fact.kind == "run.refused":
            self._refused[fact.run] = fact.author, fact.at
        elif fact.kind == "run.awaiting_approval":
            self.asked(fact)
        elif fact.kind == "plan.step" and fact.body["worker"] == OPENS:
            self.openers.add((fact.run, fact.body["n"]))

    def _check_epochs(self, leads: Mapping[str, tuple[str, int]]) -> None:
        """Nobody drives a run of another's without a higher epoch: the old one could not be told apart."""
        for run, (who, epoch) in leads.items():
            before, under = self._leads.get(run, (who, 0))
            if who not in ("", before) and epoch <= under:  # a turn that waits for results has no driver
                self.object(f"{run}: {who} took it from {before} and left the epoch at {under}")
        self._leads |= leads

    def _see_driver(self, what: str, run: str, epoch: int, who: str) -> None:
        """A run that is given up is free for whoever comes, from then on."""
        gift = self._free.get(run)
        if what == "lowered" and (who, run) in self.giving and gift is None:
            self._free[run] = gift = Gift(run, epoch, who, self.time())
            self.gifts.append(gift)
            self.note(who, run, "given up")
        elif gift is not None and epoch > gift.epoch:
            gift.taker, gift.taken_at = who, self.time()
            del self._free[run]
        elif gift is not None and what == "raised" and self.time() > gift.at + OVERTAKEN:
            self.object(f"{run}: {who} prolonged the lease that it had given up")

    def _check_author(self, fact: Fact, driver: str | None, holder: str | None) -> None:
        """A run is written by the driver of its row, a step by the holder of its ticket, as they are at this commit."""
        drives = fact.kind in DRIVERS_WORDS or fact.kind in ENDINGS
        begins = fact.kind in GATEWAYS_WORDS and driver == ""
        if self._refused.get(fact.run) == (fact.author, fact.at):  # the end that comes with the refusal of a plan
            begins = True
        if drives and not begins and fact.author != driver:
            self.object(f"{fact.run}: {fact.author} wrote {fact.kind}, but {driver} drives the run")
        if drives and fact.run in self._free and fact.author == self._free[fact.run].giver:
            written = self._free[fact.run].written
            written.add(fact.at)
            if len(written) > IN_FLIGHT:
                self.object(f"{fact.run}: {fact.author} wrote {fact.kind} in a run that it had given up")
        if fact.kind in DISPATCHERS_WORDS:
            n = fact.body.get("n")
            of_driver = n is None or (fact.run, n) in self.openers
            owner, title = (driver, "drives the run") if of_driver else (holder, "holds the ticket")
            if fact.author != owner:
                self.object(f"{fact.run}: {fact.author} wrote {fact.kind}, but {owner} {title}")

    def intent_of(self, body: bytes, counts: Mapping[str, int]) -> tuple[str, str] | None:
        """Return the run and the hash of a committed intent with exactly these bytes: one for which no call was `made`
        yet, if there is one, since a conversation that goes on and one that begins anew may be asked in the same
        words."""
        digests = ((run, hashlib.sha256(salt + body).hexdigest()) for run, salt in self.salts.items())
        intents = [(run, digest) for run, digest in digests if digest in self.intents]
        return next(
            (intent for intent in intents if counts.get(intent[1], 0) < self.intents[intent[1]]),
            intents[0] if intents else None,
        )


def _leads(rows: list[tuple[Any, ...]], author: str) -> dict[str, tuple[str, int]]:
    """Return who drove each run at the end of a transaction, and under which epoch. One transaction may hold the
    entry by which a driver left a run, and after it what others wrote of that run: then that driver counts. Who takes a
    run and lets it go in one entry, because its plan waits for an approval, counts as its driver, too."""
    leads: dict[str, tuple[str, int]] = {}
    for what, run, epoch, kind, _, who in rows:
        if what in ("run", "driver"):
            leads[run] = (who or leads.get(run, ("", 0))[0], epoch)
        elif kind == "run.awaiting_approval" and run in leads:
            leads[run] = (leads[run][0] or author, leads[run][1])
    return leads
