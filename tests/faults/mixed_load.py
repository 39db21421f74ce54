"""Callers of every kind at once, over several gateways, any of which may end at any time.

Each caller has one conversation after another: a run of one step, a chain, a fan-out, a loop of tools, or a background
response. It knows the public HTTP API only. Where a connection breaks, or a gateway answers that it is not ready, it
sends the same request with the same `Idempotency-Key` to the next gateway, as every client behind a load balancer may.
So it does where a stream ends with `answer_changed`, as that error says: an attempt is lost if its engine stands still
for longer than a lease, and another one calls the same tool under another id, while the stream has the first one.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import httpx
from msgspec import Struct

from tests.bench.tool_loop import read_streamed_calls
from tests.harness.processes import KEY, user_message
from tests.harness.waiting import wait_until
from tests.integration.installation import CHAIN, TREE, WORKERS
from tests.stubs import Agent, Reply, ToolCall
from tests.stubs.control import StubControl

WORDS: Final = tuple(f"word{number} " for number in range(12))
"""The chunks of every answer that calls no tools."""
TEXTS: Final = ("".join(WORDS), "My part.")
"""What the workers answer; the second text is that of the one who calls tools where they are offered."""
TURNS: Final = ("one", "two", "three")
"""The words that the results of a loop of tools bring, one a turn."""
AWAY: Final = (429, 503)
"""Statuses after which nothing was begun, and a caller asks again."""
CHANGED: Final = "answer_changed"
"""The error of a stream that has sent what is not part of the answer."""
REQUEST_SECONDS: Final = 60.0
TOOL: Final = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
UNFINISHED: Final = ("queued", "in_progress")


class WrongAnswer(AssertionError):
    """A caller got what no caller may get."""


class Stream(Struct, frozen=True):
    """A streamed chat completion that came to its end, as its caller saw it."""

    text: str
    id: str
    last_event: int

    @staticmethod
    def read(body: str) -> "Stream":
        """Read the whole of it. Raises WrongAnswer for an error event, or where the end is missing."""
        if not body.endswith("data: [DONE]\n\n"):
            raise WrongAnswer(f"a stream without an end: {body[-500:]}")
        frames = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(frame) for frame in frames]
        errors = [chunk for chunk in chunks if "error" in chunk]
        if errors:
            raise WrongAnswer(str(errors[0]))
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        numbers = [int(line.removeprefix("id: ")) for line in body.splitlines() if line.startswith("id: ")]
        (name,) = {chunk["id"] for chunk in chunks}
        return Stream(text, name, numbers[-1])


class AnsweredRequest(Struct, frozen=True):
    """A request that was answered to its end, and all that is needed to send it again."""

    path: str
    body: dict[str, Any]
    key: str
    reply: str

    @property
    def repeatable_part(self) -> str | Stream:
        """Return the part of a reply that must be the same each time it is requested: the bytes of a body,
        the contents of a stream, and the id of a background response, which goes on meanwhile."""
        if self.body.get("background"):
            return str(json.loads(self.reply)["id"])
        return Stream.read(self.reply) if self.body.get("stream") else self.reply


@dataclass(slots=True)
class Client:
    """One caller. Its requests go to the gateways in turn, beginning with the `turn`-th."""

    urls: Sequence[str]
    turn: int = 0
    answers: list[AnsweredRequest] = field(default_factory=list)
    resent: Counter[str] = field(default_factory=Counter)
    """How often a request had to be sent again, by the error of its connection or stream, or the whole of its reply."""
    asking: str = ""
    """The gateway that has not answered it yet."""

    def post(self, path: str, body: dict[str, Any], key: str) -> str:
        """Send that request until it is answered to its end; the reply. Raises WrongAnswer."""
        reply: str = wait_until(lambda: self._send("POST", path, body, key), within=120, what=f"{path} is answered")
        self.answers.append(AnsweredRequest(path, body, key, reply))
        return reply

    def get(self, path: str) -> dict[str, Any]:
        """Read from any gateway."""
        document: dict[str, Any] = json.loads(wait_until(lambda: self._send("GET", path), within=120, what=path))
        return document

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None, key: str = "") -> str | None:
        """Return the reply; None where there is none, so that the next gateway is asked."""
        self.turn += 1
        self.asking = url = self.urls[self.turn % len(self.urls)]
        headers = {"Authorization": f"Bearer {KEY}"} | ({"Idempotency-Key": key} if key else {})
        try:
            reply = httpx.request(
                method, f"{url}{path}", json=body, headers=headers, timeout=REQUEST_SECONDS, trust_env=False
            )
        except httpx.TransportError as error:
            self.resent[type(error).__name__] += 1
            return None
        finally:
            self.asking = ""
        if reply.status_code in AWAY:
            self.resent[f"{reply.status_code} {reply.text}"] += 1
            return None
        if reply.status_code != httpx.codes.OK:
            raise WrongAnswer(f"{method} {path}: {reply.status_code} {reply.text}")
        if has_changed(reply.text):
            self.resent[CHANGED] += 1
            return None
        return reply.text


def has_changed(reply: str) -> bool:
    """Return True if that is a stream whose last event is the error of an answer that has changed."""
    last = reply.rstrip().rpartition("\n")[2].removeprefix("data: ")
    return last.startswith('{"error":') and json.loads(last)["error"]["code"] == CHANGED


def completion(client: Client, key: str, *, stream: bool, **body: Any) -> str:
    """One chat completion; its text, which must be one that a worker says."""
    request_body = {"messages": user_message(f"Question {key}"), "stream": stream, **body}
    reply = client.post("/v1/chat/completions", request_body, key)
    text = Stream.read(reply).text if stream else json.loads(reply)["choices"][0]["message"]["content"]
    if text not in TEXTS:
        raise WrongAnswer(f"{key}: {text!r}")
    return text


def one_step(client: Client, key: str, stream: bool) -> None:
    """A run of one step."""
    completion(client, key, stream=stream, model="baton-mini")


def chain(client: Client, key: str, stream: bool) -> None:
    """A run of two steps, one after the other."""
    completion(client, key, stream=stream, model="baton-ultra", baton={"plan": CHAIN})


def fan_out(client: Client, key: str, stream: bool) -> None:
    """A run that a model plans: two steps at once, and a third that joins them."""
    completion(client, key, stream=stream, model="baton-ultra")


def tool_loop(client: Client, key: str, stream: bool) -> None:
    """A run that waits for its caller three times."""
    messages: list[dict[str, Any]] = list(user_message(f"Question {key}"))
    for turn, word in enumerate(TURNS):
        calls = tool_calls(client, key, messages, turn, stream=stream)
        last = turn + 1 == len(TURNS)
        result = {"word": word, "then": [] if last else [{"name": "look", "arguments": {}}]}
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)} for call in calls]
    body = {"model": "baton-mini", "messages": messages, "tools": [TOOL]}
    reply = json.loads(client.post("/v1/chat/completions", body, f"{key}.end"))
    text = reply["choices"][0]["message"]["content"]
    if text != "".join(f"{word} " for word in TURNS):
        raise WrongAnswer(f"{key}: {text!r}")


def tool_calls(
    client: Client, key: str, messages: list[dict[str, Any]], turn: int, *, stream: bool
) -> list[dict[str, Any]]:
    """Return the calls of one turn, of which there must be one."""
    body = {"model": "baton-mini", "messages": list(messages), "tools": [TOOL], "stream": stream}
    reply = client.post("/v1/chat/completions", body, f"{key}.{turn}")
    calls: list[dict[str, Any]] = []
    if stream:
        lines = [line for line in reply.splitlines() if line.startswith("data: ")]
        calls = read_streamed_calls("\n".join(lines).encode())
    else:
        calls = json.loads(reply)["choices"][0]["message"].get("tool_calls") or []
    if len(calls) != 1:
        raise WrongAnswer(f"{key}, turn {turn}: {reply}")
    return calls


def background(client: Client, key: str, stream: bool) -> None:
    """A response that nobody waits for while it is made; any gateway is asked what became of it."""
    body = {"model": "baton-mini", "input": f"Question {key}", "background": True}
    response = json.loads(client.post("/v1/responses", body, key))
    path = f"/v1/responses/{response['id']}"
    whole = wait_until(lambda: response_if_ended(client.get(path)), within=120, what=f"{path} ends")
    text = "".join(part["text"] for item in whole["output"] for part in item["content"])
    if whole["status"] != "completed" or text not in TEXTS:
        raise WrongAnswer(f"{key}: {whole}")


def response_if_ended(response: dict[str, Any]) -> dict[str, Any] | None:
    """Return the response once it has ended."""
    return None if response["status"] in UNFINISHED else response


KINDS: Final[tuple[Callable[[Client, str, bool], None], ...]] = (one_step, chain, fan_out, tool_loop, background)


@dataclass(slots=True)
class MixedLoad:
    """`callers` of each kind, each in a thread of its own, until `stop`. Every other conversation is streamed."""

    urls: Sequence[str]
    callers: int = 2
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0
    """Seconds that the longest conversation took."""
    clients: list[Client] = field(default_factory=list)
    _done: Counter[str] = field(default_factory=Counter)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begin to ask."""
        for kind in KINDS:
            for number in range(self.callers):
                name = f"{kind.__name__}-{number}"
                client = Client(self.urls, turn=len(self.clients))
                self.clients.append(client)
                self._threads.append(threading.Thread(target=self._converse, args=(kind, client, name), name=name))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Begin no more conversations, and wait for the end of those that were begun."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def go_on(self) -> None:
        """Wait until every caller has had a conversation that began after this call. Raises WrongAnswer."""
        before = Counter(self._done)
        wait_until(lambda: self.failures or self._all_beyond(before), within=150, what="every caller is answered")
        self.check()

    def wait_for_a_request_at(self, url: str) -> None:
        """Wait until a request is under way at that gateway."""
        wait_until(lambda: any(client.asking == url for client in self.clients), what=f"{url} is asked")

    def check(self) -> None:
        """Raise WrongAnswer if any caller has failed."""
        if self.failures:
            raise WrongAnswer("\n".join(self.failures))

    @property
    def conversations(self) -> int:
        """Return the number of conversations that have ended."""
        return self._done.total()

    @property
    def answers(self) -> list[AnsweredRequest]:
        """Every request that was answered to its end."""
        return [answer for client in self.clients for answer in client.answers]

    @property
    def resent(self) -> Counter[str]:
        """Return how often requests had to be sent again, by reason."""
        return sum((client.resent for client in self.clients), Counter())

    def _all_beyond(self, before: Counter[str]) -> bool:
        """Return whether each caller has ended two conversations since, the second of which began since."""
        return all(self._done[thread.name] >= before[thread.name] + 2 for thread in self._threads)

    def _converse(self, kind: Callable[[Client, str, bool], None], client: Client, name: str) -> None:
        try:
            for number in count():
                if self._stopping.is_set():
                    return
                began = time.monotonic()
                kind(client, f"{name}-{number}", number % 2 == 1)
                self.slowest = max(self.slowest, time.monotonic() - began)
                self._done[name] += 1
        except Exception as problem:  # a test reads it in the main thread
            self.failures.append(f"{name}: {problem!r}")


@contextmanager
def run_mixed_load(urls: Sequence[str], **more: Any) -> Iterator[MixedLoad]:
    """Callers of all kinds for the length of the block; when it is left every conversation has ended."""
    load = MixedLoad(urls, **more)
    load.start()
    try:
        yield load
    finally:
        load.stop()


def script(stub: StubControl) -> None:
    """Let the stub's workers answer as these callers expect."""
    stub.always("planner", TREE)
    for name in WORKERS:
        stub.always(name, Reply(chunks=WORDS, gap=0.03))
    stub.always("alpha", Agent(first=ToolCall("look", "{}"), delay=0.1))


def all_runs(client: Client) -> list[dict[str, Any]]:
    """Return every run of the audit trail, page by page."""
    runs: list[dict[str, Any]] = []
    page = client.get("/v1/runs?limit=100")
    while True:
        runs += page["data"]
        if not page["has_more"]:
            return runs
        page = client.get(f"/v1/runs?limit=100&after={page['next']}")
