"""No byte of an unlisted step or of withheld user text is in any provider request, whatever the plan (I-1).

Every run has a random plan; every step, subtask and message of the caller carries a canary of 128 bits, and every
request is compared with all canaries of all runs. What workers answer looks like a plan, and leads to no further step.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from app.core.message.chat import Message, Task, Text
from app.core.plan.workflow import Access
from app.core.run.state import RunState
from app.engine.calls.step_request import View
from app.engine.steps import execution
from app.process.wiring import Runtime
from app.store.protocol import Store
from tests.harness.audited import audit_once
from tests.harness.in_process import WORKERS, finish, order, pool_text, running_service
from tests.stubs import ProviderStub, Reply
from tests.stubs.record import ReceivedRequest

RUNS, AT_ONCE = 64, 8
CANARY = re.compile(r"[0-9a-f]{32}")
LAST = "Your subtask:\n"


@dataclass(frozen=True)
class Piece:
    """One step of a random plan."""

    subtask: str
    answer: str
    user: bool
    steps_read: tuple[int, ...]

    @property
    def access(self) -> list[str | int]:
        return [*(["user"] if self.user else []), *self.steps_read]


@dataclass(frozen=True)
class Game:
    """One run: what the caller says, and a plan in which at most one step has no subtask of its own."""

    texts: tuple[str, ...]
    pieces: tuple[Piece, ...]

    def plan(self, names: tuple[Any, ...], random: Random) -> dict[str, Any]:
        """The plan over these workers."""
        entries = [{"subtask": piece.subtask, "access": piece.access} for piece in self.pieces]
        return {"steps": [{"worker": random.choice(names), **entry} for entry in entries]}

    @property
    def task(self) -> Task:
        """Return the caller's task: a system message, a turn of each side, and the question."""
        roles = ("system", "user", "assistant", "user")
        talk = [Message(role, (Text(f"say {text}"),)) for role, text in zip(roles, self.texts, strict=True)]  # type: ignore[arg-type]
        return Task(tuple(talk))

    def step_of(self, received: ReceivedRequest) -> int:
        """Return the number of the step that this request is for."""
        subtask = received.json["messages"][-1]["content"].rpartition(LAST)[2]
        own = [n for n, piece in enumerate(self.pieces) if piece.subtask == subtask]
        return (own or [n for n, piece in enumerate(self.pieces) if not piece.subtask])[0]

    def expected_canaries(self, n: int) -> set[str]:
        """The canaries that belong into the request of step `n`."""
        piece = self.pieces[n]
        listed = [self.pieces[place] for place in piece.steps_read]
        own = CANARY.findall(piece.subtask)
        canaries = {canary for piece in listed for canary in CANARY.findall(piece.subtask + piece.answer)}
        return {*own, *canaries, *(self.texts if piece.user else ())}


def game(random: Random) -> Game:
    """A random run of one to five steps."""

    def canary() -> str:
        return f"{random.getrandbits(128):032x}"

    pieces = []
    bare = random.choice((None, 0, 1, 2, 3))
    for n in range(random.randint(1, 5)):
        visible = tuple(m for m in range(n) if random.random() < 0.5)
        user = random.random() < 0.5 or n == bare
        pieces.append(Piece("" if n == bare else f"Do {canary()}.", canary(), user, visible))
    return Game(tuple(canary() for _ in range(4)), tuple(pieces))


@dataclass
class Table:
    """All runs, the worker that plays every one of them, and what leaked."""

    random: Random
    games: list[Game] = field(default_factory=list)
    requests: list[tuple[Game, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def game_of(self, received: ReceivedRequest) -> Game:
        """The run that a request belongs to, by any canary in it."""
        canaries = set(CANARY.findall(received.body.decode()))
        last = set(CANARY.findall(received.json["messages"][-1]["content"].rpartition(LAST)[2])) or canaries
        return next(game for game in self.games if last & self.canaries_of(game))

    def canaries_of(self, player: Game) -> set[str]:
        """Every canary of a run."""
        return {*player.texts, *CANARY.findall("".join(piece.subtask + piece.answer for piece in player.pieces))}

    def answer(self, received: ReceivedRequest) -> Reply:
        """Check the request of a worker, and answer with the step's canary in something like a plan."""
        player = self.game_of(received)
        n = player.step_of(received)
        self.requests.append((player, n))
        canaries = set(CANARY.findall(received.body.decode())) & {
            c for each in self.games for c in self.canaries_of(each)
        }
        if canaries != player.expected_canaries(n):
            self.wrong.append(f"step {n} of {player}: {canaries ^ player.expected_canaries(n)}")
        plan = {"steps": [{"worker": "alpha", "subtask": player.pieces[n].answer, "access": ["user"]}]}
        return Reply(chunks=(json.dumps(plan), "\n```json\n", json.dumps(plan)))

    def conduct(self, received: ReceivedRequest) -> Reply:
        """The run's plan, from its conductor; a conductor sees the caller's words."""
        player = next(each for each in self.games if set(each.texts) <= set(CANARY.findall(received.body.decode())))
        if any(name in received.json["messages"][0]["content"] for name in WORKERS):
            self.wrong.append("the conductor saw names")
        return Reply(chunks=(json.dumps(player.plan((0, 1, 2), self.random)),))

    async def play(self, runtime: Runtime) -> None:
        """One run, planned by its caller or by a conductor."""
        player = game(self.random)
        self.games.append(player)
        if self.random.random() < 0.7:
            plan = player.plan(("alpha", "beta", "gamma"), self.random)
            new_order = order(runtime, "baton-mini", task=player.task, plan=plan, streams=self.random.random() < 0.5)
        else:
            new_order = order(runtime, "baton-ultra", task=player.task)
        outcome = await finish(await runtime.runs.start(new_order))
        assert outcome.ended.error is None
        assert player.pieces[-1].answer in outcome.ended.answer
        assert len(outcome.ended.state.steps) == len(player.pieces)
        assert [step.access.as_list() for step in outcome.ended.state.steps.values()] == [
            p.access for p in player.pieces
        ]


@pytest.fixture
async def runtime(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Runtime, Table]]:
    """The service, with all workers played by one table."""
    table = Table(Random(20_260_101))
    honest = "leak" not in request.fixturenames
    async with ProviderStub() as stub, running_service(tmp_path, pool_text(stub), audits=honest) as running:
        stub.always("*", table.answer)
        stub.always("planner", table.conduct)
        yield running, table


@pytest.mark.long
async def test_a_request_holds_what_its_access_list_grants_and_nothing_else(runtime: tuple[Runtime, Table]) -> None:
    running, table = runtime
    for _ in range(RUNS // AT_ONCE):
        await asyncio.gather(*(table.play(running) for _ in range(AT_ONCE)))
    assert table.wrong == []
    requests = [(id(request), n) for request, n in table.requests]
    assert len(requests) == len(set(requests)) == sum(len(player.pieces) for player in table.games)
    grants = [(piece.user, bool(piece.steps_read)) for player in table.games for piece in player.pieces]
    assert set(grants) == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.parametrize("leak", ["user", "steps", "both"])
@pytest.mark.long
async def test_an_ignored_access_list_would_be_noticed(
    runtime: tuple[Runtime, Table], monkeypatch: pytest.MonkeyPatch, leak: str
) -> None:
    """The check is shown a dispatcher that grants too much."""
    honest = execution.view_of_step

    async def leaky(store: Store, state: RunState, n: int, fresh: Mapping[str, bytes]) -> View:
        step = state.steps[n]
        done_steps = tuple(m for m, earlier in state.steps.items() if m < n and earlier.state == "done")
        wide = Access(step.access.user or leak != "steps", done_steps if leak != "user" else step.access.steps)
        return await honest(store, replace(state, steps={**state.steps, n: replace(step, access=wide)}), n, fresh)

    monkeypatch.setattr(execution, "view_of_step", leaky)
    running, table = runtime
    await asyncio.gather(*(table.play(running) for _ in range(AT_ONCE)))
    assert table.wrong
    assert "request-altered" in (await audit_once(running.pool.configuration.settings.database_url)).rules
