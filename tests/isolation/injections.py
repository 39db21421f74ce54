"""The corpus of injections against a whole service, whose workers obey whatever they read.

    python -m tests.isolation.injections [--every 1] [--first 0]

Each injection is played over every topology that its carrier can reach, over the wire formats of requests and of
providers in turns. Every request that a provider received must be one call of the journal, by the hash of its bytes;
every call must be one of the plan's, with the plan's access list; and every canary in it must stand in a text that this
list grants. Exit code 1 if anything else was found.
"""

import argparse
import asyncio
import base64
import json
import logging
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from app.core.contents import content_ref
from app.core.message.chat import run_of
from app.core.run.events import CallIntended, Event, PlanStep, RunAdmitted, StepAwaitingTool, StepDone, facts
from app.process.wiring import Runtime
from tests.harness.in_process import client_of, running_service
from tests.isolation.injection_corpus import FORGED_CALL, OUTSIDER, UNCLEARED, Injection, corpus
from tests.stubs import KEYS, ProviderStub, Reply, ToolCall
from tests.stubs.record import ReceivedRequest

OUTBOUND = ("openai", "responses", "anthropic", "gemini")
INBOUND = ("chat", "responses", "messages", "completions")
TOPOLOGIES = ("single", "chain", "fan_out", "caller", "rounds", "nested", "steered", "tools")
NAMES = ("alpha", "beta", "gamma", UNCLEARED)
CANARY = re.compile(r"CANARY-[a-z0-9]+-[a-z0-9]+")
LABEL = "phi"
ECHO = 6_000
"""Characters of what it was shown that a worker repeats, in about every other scene of each topology; in the rest it
keeps them to itself, so that whoever sees them was shown them."""
MOST_STEERED = 16
"""Calls of workers in a run whose conductor plans what an injection says: four steps in each of two rounds, twice."""
STEPS = {"single": 1, "chain": 3, "fan_out": 3, "caller": 3, "rounds": 2, "nested": 3, "tools": 3}
PROVIDER = """
[providers.{name}]
format = "{format}"
base_url = "{url}"
key = "STUB_KEY_{upper}"
"""
WORKER = """
[workers.{worker}-{name}]
provider = "{provider}"
model = "{worker}-{name}"
price = {{ input = 1.0, output = 2.0 }}
tools = true
{clearance}
"""
TIERS = """
[tiers.single-{name}]
pool = [{pool}]
conductor = {{ kind = "fixed", shape = "single", workers = ["alpha-{name}"] }}
limits = {{ steps = 5, attempts = 2, seconds = 60, output_tokens = 4000, usd = "2.00" }}

[tiers.chain-{name}]
pool = [{pool}]
conductor = {{ kind = "fixed", shape = "chain", workers = ["alpha-{name}", "beta-{name}", "gamma-{name}"] }}
limits = {{ steps = 5, attempts = 2, seconds = 60, output_tokens = 4000, usd = "2.00" }}

[tiers.fan_out-{name}]
pool = [{pool}]
conductor = {{ kind = "fixed", shape = "fan_out", workers = ["alpha-{name}", "beta-{name}"], width = 2 }}
limits = {{ steps = 5, attempts = 2, seconds = 60, output_tokens = 4000, usd = "2.00" }}

[tiers.model-{name}]
pool = [{pool}]
conductor = {{ kind = "model", worker = "planner" }}
limits = {{ steps = 4, attempts = 2, seconds = 60, output_tokens = 4000, usd = "2.00", rounds = 2, depth = {depth} }}
"""


def pool_text(stub: ProviderStub) -> str:
    """Return a pool file with workers of every wire format, each with one that is not cleared, and one that no tier
    has."""
    text = PROVIDER.format(name="vllm", format="openai", url=stub.vllm_url, upper="VLLM")
    text += WORKER.format(worker="planner", name="0", provider="vllm", clearance=f'clearance = ["{LABEL}"]')
    text = text.replace("planner-0", "planner") + WORKER.format(
        worker=OUTSIDER, name="0", provider="vllm", clearance=f'clearance = ["{LABEL}"]'
    ).replace(f"{OUTSIDER}-0", OUTSIDER)
    for name in OUTBOUND:
        text += PROVIDER.format(name=name, format=name, url=getattr(stub, f"{name}_url"), upper=name.upper())
        for worker in NAMES:
            clearance = "" if worker == UNCLEARED else f'clearance = ["{LABEL}"]'
            text += WORKER.format(worker=worker, name=name, provider=name, clearance=clearance)
        pool = ", ".join(f'"{worker}-{name}"' for worker in NAMES)
        text += TIERS.format(name=name, pool=pool, depth=1)
    return text


def environment() -> dict[str, str]:
    """Return the keys that the stub accepts."""
    return {f"STUB_KEY_{name.upper()}": key for name, key in KEYS.items()} | {"STUB_KEY_VLLM": "none"}


@dataclass
class Scene:
    """One run to play, and what its workers and its conductor do."""

    injection: Injection | None
    topology: str
    inbound: str
    outbound: str
    number: int
    planned: int = 0
    """Planning calls so far."""
    answers: dict[int, str] = field(default_factory=dict)
    """The text of each reply, by the identity of its request."""

    @property
    def tier(self) -> str:
        """The tier that is asked."""
        return f"{self.topology if self.topology in ('single', 'chain', 'fan_out') else 'model'}-{self.outbound}"

    @property
    def repeats(self) -> bool:
        """True if workers repeat what they were shown."""
        return bool(self.number // len(TOPOLOGIES) % 2)

    @property
    def forges(self) -> bool:
        """True if workers call a tool that was not offered, so that no worker's answer can be used."""
        forged = self.injection is not None and self.injection.family == "forged tool call"
        return forged and self.topology == "single"

    def payload(self, carrier: str) -> str:
        """Return the injection's text if this carrier holds it."""
        return self.injection.text if self.injection is not None and self.injection.carrier == carrier else ""


class Cast:
    """The obedient workers and the conductor of all scenes, one scene after the other."""

    def __init__(self, stub: ProviderStub) -> None:
        self.scene = Scene(None, "single", "chat", "openai", 0)
        stub.always("*", self.answer)

    def answer(self, received: ReceivedRequest) -> Reply:
        """The reply of whoever is asked."""
        return self.conduct(received) if received.model == "planner" else self.obey(received)

    def obey(self, received: ReceivedRequest) -> Reply:
        """Repeat everything that was shown, with a canary of its own, and carry out what a text demands of a worker."""
        scene, request_text = self.scene, received.body.decode(errors="replace")
        document = json.dumps(received.json, ensure_ascii=False)
        repeated = f"I was shown: {document[:ECHO]}" if scene.repeats else ""
        text = f"CANARY-out-{len(scene.answers)}n{scene.number} {scene.payload('worker output')} {repeated}"
        scene.answers[id(received)] = text
        calls = [ToolCall("shell", json.dumps({"run": "CANARY-args-0"}), id=FORGED_CALL)] if scene.forges else []
        if scene.topology == "tools" and '"look"' in request_text and "CANARY-tool" not in request_text:
            calls = [ToolCall("look", json.dumps({"all": "CANARY-args-0"}), id=FORGED_CALL)]
        return Reply(chunks=(text,), tool_calls=calls, finish="tool" if calls else "stop")

    def conduct(self, received: ReceivedRequest) -> Reply:
        """Plan as the topology wants it; a steered conductor writes down the plan that it finds in its prompt."""
        scene = self.scene
        scene.planned += 1
        plan = _plan(scene.topology, scene.planned)
        if scene.topology == "steered" and scene.injection is not None:
            plan = scene.injection.text
        return Reply(chunks=(plan,))


def _plan(topology: str, step_count: int) -> str:
    steps: list[dict[str, Any]] = []
    if topology == "nested" and step_count == 1:  # ordinal 3 is the conductor itself
        steps = [
            {"worker": 0, "subtask": "Draft it.", "access": ["user"]},
            {"worker": 3, "subtask": "Mend it.", "access": [0]},
        ]
    elif topology == "nested" and step_count == 2:
        steps = [{"worker": 1, "subtask": "Mend.", "access": ["user"]}, {"worker": 2, "subtask": "Sum.", "access": [0]}]
    elif step_count == 1:
        steps = [
            {"worker": 0, "subtask": "Think.", "access": ["user"]},
            {"worker": 1, "subtask": "Say.", "access": [0]},
        ]
    return json.dumps({"steps": steps})


@dataclass
class Findings:
    """The scenes that were played, and every finding that should not be there."""

    runs: int = 0
    calls: int = 0
    injections: set[str] = field(default_factory=set)
    topologies: Counter[str] = field(default_factory=Counter)
    extra_calls: list[str] = field(default_factory=list)
    authority: list[str] = field(default_factory=list)
    canaries: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """Everything that should not have been."""
        return [*self.extra_calls, *self.authority, *self.canaries, *self.faults]


def scenes(injections: Iterable[Injection]) -> Iterable[Scene]:
    """Return every injection over every topology that its carrier can reach; the wire formats take turns."""
    number = 0
    for place, injection in enumerate(injections):
        for topology in TOPOLOGIES:
            if injection.carrier == "tool result" and topology != "tools":
                continue
            inbound = INBOUND[(place + number) % len(INBOUND)]
            if inbound == "completions" and (topology == "tools" or injection.carrier in ("document", "name")):
                inbound = "chat"
            number += 1
            yield Scene(injection, topology, inbound, OUTBOUND[(place // 3 + number) % len(OUTBOUND)], number)


async def play(runtime: Runtime, stub: ProviderStub, chosen: Iterable[Scene]) -> Findings:
    """Play the scenes on a running service, one after the other."""
    findings, cast = Findings(), Cast(stub)
    async with client_of(runtime) as client:
        for scene in chosen:
            cast.scene = scene
            stub.requests.clear()
            await _act(runtime, stub, client, scene, findings)
            findings.runs += 1
            findings.topologies[scene.topology] += 1
            if scene.injection is not None:
                findings.injections.add(scene.injection.name)
    return findings


async def _act(
    runtime: Runtime, stub: ProviderStub, client: httpx.AsyncClient, scene: Scene, findings: Findings
) -> None:
    path, body = request(scene)
    reply = await client.post(path, json=body)
    injection_name = scene.injection.name if scene.injection is not None else "no injection"
    about = f"{injection_name} / {scene.topology}, {scene.inbound}, {scene.outbound}"
    run = reply.headers.get("x-baton-run", "")
    if reply.status_code != 200 and not scene.forges:
        findings.faults.append(f"{about}: {reply.status_code} {reply.text[:300]}")
        return
    texts = [json.dumps(body, ensure_ascii=False)]
    if scene.topology == "tools":
        texts.append(await _results(client, scene, path, body, reply.json(), findings, about))
    journal = await runtime.context.store.journal(run)
    Judge(scene, about, journal.salt, journal.events, list(stub.requests), texts, findings).judge()


# -- requests


def request(scene: Scene) -> tuple[str, dict[str, Any]]:
    """The request of a scene, with the injection where its carrier is part of a request."""
    name = scene.payload("name")
    question = f"CANARY-user-{scene.number} asks. {scene.payload('task text')}"
    baton: dict[str, Any] = {"labels": [LABEL]}
    if scene.topology == "caller":
        baton["plan"] = _callers_plan(scene.outbound)
    if scene.topology == "steered" and scene.injection is not None:
        question += f" {scene.injection.text}"
    body: dict[str, Any] = {"model": scene.tier, "baton": baton}
    if scene.inbound != "messages":
        body |= {"user": (name or "ann")[:500]} | ({"metadata": {"team": name[:500]}} if name else {})
    maker = {"chat": _chat, "responses": _responses, "messages": _messages, "completions": _completions}
    return maker[scene.inbound](scene, body, question, name)


def _callers_plan(outbound: str) -> dict[str, Any]:
    steps = [("alpha", "Draft.", ["user"]), ("beta", "Judge.", [0]), ("gamma", "Answer.", ["user", 1])]
    return {"steps": [{"worker": f"{step}-{outbound}", "subtask": task, "access": see} for step, task, see in steps]}


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"all": {"type": "string"}}}
    return {"name": "look", "description": (name or "Looks.")[:900], "parameters": parameters}


def _file(scene: Scene) -> tuple[str, str]:
    text = f"CANARY-doc-{scene.number} {scene.payload('document')}"
    return text, f"data:text/plain;base64,{base64.b64encode(text.encode()).decode()}"


def _chat(scene: Scene, body: dict[str, Any], question: str, name: str) -> tuple[str, dict[str, Any]]:
    part = {"type": "file", "file": {"filename": (name or "a.txt")[:500], "file_data": _file(scene)[1]}}
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": question}, part]}]
    if scene.topology == "tools":
        body["tools"] = [{"type": "function", "function": _tool(name)}]
    return "/v1/chat/completions", body


def _responses(scene: Scene, body: dict[str, Any], question: str, name: str) -> tuple[str, dict[str, Any]]:
    part = {"type": "input_file", "filename": (name or "a.txt")[:500], "file_data": _file(scene)[1]}
    body["input"] = [{"role": "user", "content": [{"type": "input_text", "text": question}, part]}]
    if scene.topology == "tools":
        body["tools"] = [{"type": "function", **_tool(name)}]
    return "/v1/responses", body


def _messages(scene: Scene, body: dict[str, Any], question: str, name: str) -> tuple[str, dict[str, Any]]:
    source = {"type": "text", "media_type": "text/plain", "data": _file(scene)[0]}
    part = {"type": "document", "source": source, "title": (name or "a.txt")[:400]}
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": question}, part]}]
    body |= {"max_tokens": 3_000} | ({"metadata": {"user_id": name[:250]}} if name else {})
    if scene.topology == "tools":
        tool = _tool(name)
        body["tools"] = [{**tool, "input_schema": tool["parameters"]}]
        del body["tools"][0]["parameters"]
    return "/v1/messages", body


def _completions(scene: Scene, body: dict[str, Any], question: str, _name: str) -> tuple[str, dict[str, Any]]:
    del body["user"]
    body.pop("metadata", None)
    return "/v1/completions", body | {"prompt": question}


# -- tool results


async def _results(
    client: httpx.AsyncClient,
    scene: Scene,
    path: str,
    body: dict[str, Any],
    reply: dict[str, Any],
    findings: Findings,
    about: str,
) -> str:
    """Send the results of a run's tool calls, after results under an id that was never issued. Returns their text."""
    result = f"CANARY-tool-{scene.number} {scene.payload('tool result')}"
    ids = _ids(scene.inbound, reply)
    if not ids:
        findings.faults.append(f"{about}: no tool was called: {json.dumps(reply)[:300]}")
        return result
    if FORGED_CALL in ids or any(run_of(call_id) is None for call_id in ids):
        findings.authority.append(f"{about}: a tool call has an id that Baton did not mint: {ids}")
    forged = await client.post(path, json=_continue_with_results(scene, body, reply, [FORGED_CALL], result))
    if forged.status_code == 200:
        findings.authority.append(f"{about}: results under a forged id were accepted")
    last = await client.post(path, json=_continue_with_results(scene, body, reply, ids, result))
    if last.status_code != 200:
        findings.faults.append(f"{about}: {last.status_code} {last.text[:300]}")
    return result


def _ids(inbound: str, reply: dict[str, Any]) -> list[str]:
    if inbound == "chat":
        return [call["id"] for call in reply["choices"][0]["message"].get("tool_calls", ())]
    if inbound == "responses":
        return [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
    return [block["id"] for block in reply["content"] if block["type"] == "tool_use"]


def _continue_with_results(
    scene: Scene, body: dict[str, Any], reply: dict[str, Any], ids: list[str], result: str
) -> dict[str, Any]:
    """Return the conversation with the calls under these ids and their results."""
    if scene.inbound == "chat":
        calls = [{"id": id_, "type": "function", "function": {"name": "look", "arguments": "{}"}} for id_ in ids]
        assistant_turn = {"role": "assistant", "content": None, "tool_calls": calls}
        came = [{"role": "tool", "tool_call_id": id_, "content": result} for id_ in ids]
        return body | {"messages": [*body["messages"], assistant_turn, *came]}
    if scene.inbound == "responses":
        calls_of_response = [
            {"type": "function_call", "call_id": id_, "name": "look", "arguments": "{}"} for id_ in ids
        ]
        came = [{"type": "function_call_output", "call_id": id_, "output": result} for id_ in ids]
        return body | {"input": [*body["input"], *calls_of_response, *came]}
    used = [{"type": "tool_use", "id": id_, "name": "look", "input": {}} for id_ in ids]
    came = [{"type": "tool_result", "tool_use_id": id_, "content": result} for id_ in ids]
    turns = [{"role": "assistant", "content": used}, {"role": "user", "content": came}]
    return body | {"messages": [*body["messages"], *turns]}


# -- the judge


@dataclass
class Judge:
    """Compares what providers received in one run with its journal."""

    scene: Scene
    about: str
    salt: bytes
    events: tuple[Event, ...]
    received: list[ReceivedRequest]
    texts: list[str]
    """What the caller sent: the request, and the results of tools."""
    findings: Findings

    def judge(self) -> None:
        """Apply all rules."""
        intents = {fact.call: fact for fact in facts(self.events, CallIntended)}
        by_recipient: dict[tuple[str, str], list[ReceivedRequest]] = {}
        for request in self.received:  # equal requests in the order of their arrival
            by_recipient.setdefault((content_ref(self.salt, request.body), request.model), []).append(request)
        of_calls: dict[str, ReceivedRequest] = {}
        for call, intent in intents.items():
            if came := by_recipient.get((intent.request, intent.worker)):
                of_calls[call] = came.pop(0)
        self.findings.calls += len(self.received)
        strangers = len(self.received) - len(of_calls)
        if strangers or len(of_calls) != len(intents):
            self._extra(f"{len(self.received)} requests were received, and {len(intents)} calls are journaled")
        planned = {fact.n: fact for fact in facts(self.events, PlanStep)}
        self._authority(intents, planned)
        self._count(intents)
        answers = {call: self.scene.answers.get(id(request), "") for call, request in of_calls.items()}
        for call, intent in intents.items():
            if call in of_calls:
                self._canaries(intent, of_calls[call], intents, planned, answers)

    def _extra(self, what: str) -> None:
        self.findings.extra_calls.append(f"{self.about}: {what}")

    def _count(self, intents: Mapping[str, CallIntended]) -> None:
        """A conductor that obeys may plan what it likes within its limits; every other plan is known beforehand."""
        steps = [intent for intent in intents.values() if intent.n is not None]
        most = STEPS.get(self.scene.topology, MOST_STEERED)
        most += self.scene.forges
        if len(steps) > most or (self.scene.topology != "steered" and len(steps) != most):
            self._extra(f"{len(steps)} calls of workers, {most} were expected")
        if any(step.attempt > 2 for step in steps):
            self._extra("a step had more attempts than its tier allows")

    def _authority(self, intents: Mapping[str, CallIntended], planned: Mapping[int, PlanStep]) -> None:
        [admitted] = facts(self.events, RunAdmitted)
        wrong = []
        of_callers_plan = self.scene.topology == "caller"  # in which a step might have read nothing with a label
        expected = [name for name in NAMES if name != UNCLEARED or of_callers_plan]
        if set(admitted.pool) != {f"{name}-{self.scene.outbound}" for name in expected}:
            wrong.append(f"the pool is {admitted.pool}")
        if admitted.labels != frozenset({LABEL}):
            wrong.append(f"the labels are {sorted(admitted.labels)}")
        if (admitted.limits.attempts, admitted.limits.usd) != (2, 2_000_000) or admitted.limits.steps > 5:
            wrong.append(f"the limits are {admitted.limits}")
        allowed = {"planner", *[name for name in admitted.pool if not name.startswith(UNCLEARED)]}
        wrong += [f"{request.model} was called" for request in self.received if request.model not in allowed]
        for intent in intents.values():
            step = planned.get(intent.n) if intent.n is not None else None
            if step is not None and intent.access != step.access:
                wrong.append(f"step {step.n} was planned with {step.access}, and saw {intent.access}")
        issued = [call.id for fact in facts(self.events, StepAwaitingTool) for call in fact.calls]
        wrong += [f"the id {id_} was issued" for id_ in issued if id_ == FORGED_CALL or run_of(id_) is None]
        self.findings.authority += [f"{self.about}: {fault}" for fault in wrong]

    def _canaries(
        self,
        intent: CallIntended,
        request: ReceivedRequest,
        intents: Mapping[str, CallIntended],
        planned: Mapping[int, PlanStep],
        answers: Mapping[str, str],
    ) -> None:
        """Each canary in a request must stand in a text that the access list grants, or in the step's own exchange."""
        answers_by_step = {fact.n: answers.get(fact.call, "") for fact in facts(self.events, StepDone)}
        answers_by_step |= {
            fact.n: answers_by_step.get(fact.from_step, "")
            for fact in facts(self.events, StepDone)
            if fact.from_step is not None
        }
        granted = [self.texts[0]] if intent.access.user else []
        if intent.access.user and self.scene.inbound != "completions":
            granted.append(f"CANARY-doc-{self.scene.number}")
        granted += [answers_by_step.get(n, "") for n in intent.access.steps]
        if intent.n is not None:
            own = [
                call for call, call_intended in intents.items() if call_intended.n == intent.n and call != intent.call
            ]
            granted += [answers.get(call, "") for call in own]
            granted += [*self.texts[1:], "CANARY-args-0"] if own else []
        granted_canaries = {canary for text in granted for canary in CANARY.findall(text)}
        canaries = set(CANARY.findall(request.body.decode(errors="replace")))
        if leaked := sorted(canaries - granted_canaries):
            who = "the conductor" if intent.n is None else f"step {intent.n}"
            self.findings.canaries.append(f"{self.about}: {who} was shown {leaked}")


def sample_scenes(number: int) -> list[Scene]:
    """So many scenes, spread evenly over all."""
    every = list(scenes(corpus()))
    return every[:: len(every) // number | 1]  # an odd number, since topologies and wire formats take turns


async def play_scenes(folder: Path, chosen: Iterable[Scene], *, audits: bool = True) -> Findings:
    """Play the scenes on a service of their own; the independent auditor reads its journal at the end."""
    async with ProviderStub() as stub:
        service = running_service(folder, pool_text(stub), environment(), audits=audits)
        async with service as runtime:
            return await play(runtime, stub, chosen)


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.isolation.injections")
    parser.add_argument(
        "--every", type=int, default=1, help="Play each n-th scene only; an odd number plays all topologies."
    )
    parser.add_argument("--first", type=int, default=0, help="Begin with this scene.")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        every = list(scenes(corpus()))
        findings = asyncio.run(play_scenes(Path(name), every[options.first :: options.every]))
    shapes = ", ".join(f"{topology} {number}" for topology, number in sorted(findings.topologies.items()))
    print(
        f"{len(findings.injections)} injections in {findings.runs} runs ({shapes}), "
        f"{findings.calls} requests to providers"
    )
    for title in ("extra_calls", "authority", "canaries", "faults"):
        wrong = getattr(findings, title)
        print(f"{title.replace('_', ' ')}: {len(wrong)}", *wrong[:20], sep="\n  ")
    print(f"{time.monotonic() - began:.0f} s, {time.process_time():.0f} s of CPU")
    return bool(findings.wrong)


if __name__ == "__main__":
    sys.exit(main())
