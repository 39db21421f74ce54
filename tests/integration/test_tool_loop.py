"""A coding agent's loop of tools over real processes that are killed, and told to stop, in the middle of it.

The agent is a user's program over the official client: it does what the calls say with its files, and sends a turn
again where the connection broke. One gateway and one dispatcher: when both are gone, nothing of the run is in memory
anywhere.
"""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.harness.processes import Caller, open_caller, run_command
from tests.harness.waiting import wait_until
from tests.integration.installation import WORKERS, Installation, launch, settings
from tests.stubs import Agent, ToolCall, plan_reply
from tests.stubs.control import StubControl

pytestmark = [pytest.mark.integration, pytest.mark.faults]

TURNS = 20
TWICE = 5
"""The turn that calls two tools at once."""
KILLED, STOPPED = 8, 14
"""The turns in which both processes get SIGKILL, and SIGTERM."""
THINKING = 0.5
"""Seconds that the worker takes for those."""
PLAN = plan_reply((0, "Find out what there is.", ["user"]), (1, "Do it with the tools.", ["user", 0]))
NAMES = ("read_file", "list_files", "search")
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
    for name in NAMES
]


def call(turn: int) -> ToolCall:
    """Return the tool call of a turn."""
    return ToolCall(NAMES[turn % len(NAMES)], json.dumps({"path": f"src/part_{turn:02}.py"}))


def word(name: str, path: str) -> str:
    """Return the content of a file, which nobody can guess."""
    return hashlib.sha256(f"{name} {path}".encode()).hexdigest()[:12]


def results_by_call() -> dict[tuple[str, str], str]:
    """Return the result of each call. A result names the calls of the next turn, so each depends on the one before."""
    results = {}
    for turn in range(TURNS):
        following = [call(turn + 1)] if turn + 1 < TURNS else []
        following = [ToolCall("search", '{"path": "src/aside.py"}'), *following] if turn + 1 == TWICE else following
        then = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in following]
        name, path = call(turn).name, json.loads(call(turn).arguments)["path"]
        results[name, path] = json.dumps({"word": word(name, path), "then": then})
    results["search", "src/aside.py"] = json.dumps({"word": word("search", "src/aside.py"), "then": []})
    return results


def answer() -> str:
    """All words in the order in which they were asked for."""
    words = [word(call(turn).name, json.loads(call(turn).arguments)["path"]) for turn in range(TURNS)]
    words.insert(TWICE, word("search", "src/aside.py"))
    return "".join(f"{word} " for word in words)


@dataclass
class Coder:
    """The agent. Turns of even number are streamed."""

    caller: Caller
    files: dict[tuple[str, str], str] = field(default_factory=results_by_call)
    messages: list[Any] = field(default_factory=lambda: [{"role": "user", "content": "What do the files say?"}])
    runs: set[str] = field(default_factory=set)
    ids: list[str] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    """Turns whose connection broke, or that found nobody there, once for each try."""

    def turn(self, number: int) -> str | None:
        """Ask, and do what is wanted; the answer where nothing is."""
        message = wait_until(lambda: self._ask(number), what=f"turn {number} is answered")
        self.messages.append(message)  # the client's own object, as its users do
        for tool_call in message.tool_calls or ():
            self.ids.append(tool_call.id)
            result = self.files[tool_call.function.name, json.loads(tool_call.function.arguments)["path"]]
            self.messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": result})
        return None if message.tool_calls else message.content

    def _ask(self, number: int) -> Any:
        """The next message; None where the connection broke, or nobody is there yet."""
        request_body: Any = {"model": "baton-ultra", "messages": self.messages, "tools": TOOLS}
        completions = self.caller.client.chat.completions
        try:
            if number % 2 == 0:
                with completions.stream(**request_body) as stream:
                    reply: Any = stream.get_final_completion()
            else:
                reply = completions.create(**request_body)
        except (openai.APIConnectionError, httpx.TransportError):
            self.broken.append(number)
            return None
        self.runs.add(reply.id.removeprefix("chatcmpl-").partition("-")[0])
        return reply.choices[0].message


@pytest.fixture
def installation(tmp_path: Path, stub: StubControl, database: str, redis_server_url: str) -> Iterator[Installation]:
    environ = settings(tmp_path, stub, database, redis_server_url)
    with launch(tmp_path, environ, "gateway", "dispatcher") as (gateway, dispatcher):
        new_installation = Installation(stub, database, redis_server_url, gateway, [dispatcher])
        there(new_installation)
        stub.always("planner", PLAN)
        for name in WORKERS:
            stub.always(name, Agent(first=call(0)))
        yield new_installation


def there(installation: Installation) -> None:
    """Wait until both processes are, and ready."""
    for process in (installation.gateway, *installation.dispatchers):
        process.wait_until_announced()
    wait_until(installation.gateway.ready)


def restart(installation: Installation, kills: bool) -> None:
    """End both processes at once, and start them again."""
    both = (installation.gateway, *installation.dispatchers)
    for process in both:
        process.kill() if kills else process.send_sigterm()
    for process in both:
        assert process.wait_for_exit() == 0
    for process in both:
        process.start(wait=False)
    there(installation)


def requests_to(installation: Installation, worker: str) -> list[dict[str, Any]]:
    """Return the requests that a worker was sent in its tool loop."""
    bodies = [json.loads(record["body"]) for record in installation.stub.requests(worker)]
    return [body for body in bodies if body.get("tools")]


def loop(installation: Installation, coder: Coder, aside: ThreadPoolExecutor) -> str:
    """All turns, with the two restarts; the worker that called the tools."""
    assert coder.turn(0) is None
    (worker,) = [name for name in WORKERS if requests_to(installation, name)]
    for number in range(1, TURNS):
        if number not in (KILLED, STOPPED):
            assert coder.turn(number) is None
            continue
        calls = len(requests_to(installation, worker))
        installation.stub.script(worker, Agent(first=call(0), delay=THINKING))
        turn = aside.submit(coder.turn, number)
        wait_until(lambda calls=calls: len(requests_to(installation, worker)) > calls, what="the worker is asked")
        restart(installation, kills=number == KILLED)
        assert turn.result() is None
    return worker


def test_a_loop_of_twenty_turns_outlives_every_process(installation: Installation) -> None:
    """One run, one plan, one step and its one worker; only the call that was killed is made again."""
    with ThreadPoolExecutor(1) as aside, open_caller(installation.gateway.url) as caller:
        coder = Coder(caller)
        worker = loop(installation, coder, aside)
        assert coder.turn(TURNS) == answer()
        (name,) = coder.runs
        run, kinds = caller.run(name), [event["kind"] for event in caller.events(name)]
    assert KILLED in coder.broken
    assert STOPPED not in coder.broken, "who is told to stop answers first"
    assert len(coder.ids) == len(set(coder.ids)) == TURNS + 1
    assert (run["state"], run["degraded"], len(run["turns"])) == ("succeeded", False, TURNS + 1)
    assert (kinds.count("plan.opened"), kinds.count("run.resumed")) == (1, TURNS)
    first, second = run["steps"]
    assert (first["worker"] != worker, len(first["attempts"]), first["exchanges"]) == (True, 1, [])
    assert [exchange["turn"] for exchange in second["exchanges"]] == list(range(TURNS))
    assert (
        {attempt["worker"] for attempt in (*second["exchanges"], *second["attempts"])} == {second["worker"]} == {worker}
    )
    outcomes = ["ok"] * (TURNS + 1)
    outcomes.insert(KILLED, "unknown")
    assert [attempt["outcome"] for attempt in second["attempts"]] == outcomes
    assert [call["id"] for exchange in second["exchanges"] for call in exchange["calls"]] == coder.ids
    assert sum(len(requests_to(installation, name)) for name in WORKERS) == len(outcomes)
    audit = run_command(installation.gateway.folder, installation.gateway.environ, "audit", "check", "--json")
    assert (audit.returncode, json.loads(audit.stdout)["violations"]) == (0, []), audit.stdout
