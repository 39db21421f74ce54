"""The requests of the operations of two tenants: one for each route of the public API."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
DECISION = {"decision": "approve", "digest": "0" * 64}
"""A decision on a plan that nobody has asked about."""


@dataclass
class IsolationRequest:
    """One request."""

    path: str
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Tenant:
    """One tenant, its client, and what it has."""

    name: str
    client: httpx.AsyncClient
    admin: httpx.AsyncClient
    """A client of the admin API."""
    runs: list[str] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    background: list[str] = field(default_factory=list)
    """Those of them that can be cancelled."""
    plans: list[str] = field(default_factory=list)
    asking: dict[str, str] = field(default_factory=dict)
    """The digests of plans that needed an approval, by run."""
    calls: list[str] = field(default_factory=list)
    """Calls of tools that wait for their results."""
    keys: list[str] = field(default_factory=list)
    """Idempotency keys that it has used."""
    key_ids: list[str] = field(default_factory=list)
    """The ids of its API keys."""
    budgets: list[str] = field(default_factory=list)
    """The ids of its budgets."""
    every: set[str] = field(default_factory=set)
    """All of its runs, those that were erased included."""

    @property
    def word(self) -> str:
        """The word that is in everything that it sends."""
        return f"secret-{self.name}-7f3a"


Chosen = Callable[[list[str]], str]
Request = Callable[[Tenant, Tenant, Chosen], IsolationRequest]
"""A request of the first tenant that names something of the second; both may be the same one."""


def chat(mine: Tenant, **more: Any) -> dict[str, Any]:
    """Return the body of a chat completion."""
    return {"model": "baton-mini", "messages": [{"role": "user", "content": f"{mine.word} asks."}], **more}


def _chat(mine: Tenant, theirs: Tenant, chosen: Chosen) -> IsolationRequest:
    kind = chosen(["plain", "stream", "tools", "results", "again", "user"])
    if kind == "results" and theirs.calls:
        call = chosen(theirs.calls)
        call_message = {"id": call, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        turns = [{"role": "assistant", "content": None, "tool_calls": [call_message]}]
        turns += [{"role": "tool", "tool_call_id": call, "content": f"{mine.word} found it."}]
        return IsolationRequest("", chat(mine, tools=[TOOL]) | {"messages": [*chat(mine)["messages"], *turns]})
    if kind == "tools":
        return IsolationRequest("", chat(mine, tools=[TOOL]))
    if kind == "again":
        return IsolationRequest("", chat(mine), {"Idempotency-Key": chosen(theirs.keys or ["first"])})
    if kind == "user":
        return IsolationRequest("", chat(mine, user=mine.word, metadata={"team": mine.word}))
    return IsolationRequest("", chat(mine, stream=kind == "stream"))


def asking(mine: Tenant, _theirs: Tenant, _chosen: Chosen) -> IsolationRequest:
    """Return a run whose plan waits for an approval, which the pool file lets its own key give."""
    return IsolationRequest("", chat(mine, baton={"approval": "required"}))


def _response(mine: Tenant, theirs: Tenant, chosen: Chosen) -> IsolationRequest:
    body: dict[str, Any] = {"model": "baton-mini", "input": f"{mine.word} asks."}
    kind = chosen(["plain", "background", "stream", "previous", "reference"]) if mine.background else "background"
    if kind == "previous" and theirs.responses:
        return IsolationRequest("", body | {"previous_response_id": chosen(theirs.responses)})
    if kind == "reference" and theirs.responses:
        item = chosen(theirs.responses).replace("resp_", "msg_", 1)
        return IsolationRequest("", body | {"input": [{"type": "item_reference", "id": item}]})
    return IsolationRequest("", body | {kind: kind in ("stream", "background"), "metadata": {"team": mine.word}})


def _list(_mine: Tenant, theirs: Tenant, chosen: Chosen) -> IsolationRequest:
    filters = [f"?after={chosen(theirs.runs)}"] if theirs.runs else []
    filters += ["", f"?tenant={theirs.name}", f"?user={theirs.word}", f"?metadata=team%3D{theirs.word}"]
    return IsolationRequest(chosen(filters))


def _name_nothing(_mine: Tenant, _theirs: Tenant, _chosen: Chosen) -> IsolationRequest:
    return IsolationRequest("")


def _continue_response(mine: Tenant, theirs: Tenant, chosen: Chosen) -> IsolationRequest:
    body: dict[str, Any] = {"model": "baton-mini", "input": f"{mine.word} asks."}
    return IsolationRequest("", body | ({"previous_response_id": chosen(theirs.responses)} if theirs.responses else {}))


def _edit(mine: Tenant) -> dict[str, Any]:
    return {"revision": 1, "edits": [{"op": "change", "step": 0, "subtask": mine.word}]}


REQUESTS: Mapping[tuple[str, str], Request] = {
    ("POST", "/v1/chat/completions"): _chat,
    ("POST", "/v1/completions"): lambda mine, _theirs, _: IsolationRequest(
        "", {"model": "baton-mini", "prompt": mine.word}
    ),
    ("POST", "/v1/messages"): lambda mine, _theirs, _: IsolationRequest("", chat(mine, max_tokens=50)),
    ("POST", "/v1/messages/count_tokens"): lambda mine, _theirs, _: IsolationRequest("", chat(mine)),
    ("GET", "/v1/me"): _name_nothing,
    ("GET", "/v1/models"): _name_nothing,
    ("GET", "/v1/models/{model:path}"): _name_nothing,
    ("POST", "/v1/responses"): _response,
    ("POST", "/v1/responses/compact"): _continue_response,
    ("POST", "/v1/responses/input_tokens"): _continue_response,
    ("GET", "/v1/responses/{response}"): lambda _mine, _theirs, chosen: IsolationRequest(chosen(["", "?stream=true"])),
    ("DELETE", "/v1/responses/{response}"): _name_nothing,
    ("POST", "/v1/responses/{response}/cancel"): lambda _mine, _theirs, _: IsolationRequest("", {}),
    ("GET", "/v1/responses/{response}/input_items"): _name_nothing,
    ("POST", "/v1/plans"): lambda mine, _theirs, _: IsolationRequest("", chat(mine)),
    ("GET", "/v1/plans"): _name_nothing,
    ("GET", "/v1/plans/{plan}"): _name_nothing,
    ("PATCH", "/v1/plans/{plan}"): lambda mine, _theirs, _: IsolationRequest("", _edit(mine)),
    ("DELETE", "/v1/plans/{plan}"): _name_nothing,
    ("POST", "/v1/plans/{plan}/run"): lambda _mine, _theirs, _: IsolationRequest("", {"revision": 1}),
    ("GET", "/v1/log/checkpoint"): _name_nothing,
    ("GET", "/v1/log/tile/{tile:path}"): _name_nothing,
    ("GET", "/v1/log/verify"): _name_nothing,
    ("GET", "/v1/reports"): lambda _mine, theirs, chosen: IsolationRequest(
        chosen(["?by=user", "?by=key", f"?tenant={theirs.name}", f"?user={theirs.word}"])
    ),
    ("GET", "/v1/overview"): lambda _mine, theirs, chosen: IsolationRequest(chosen(["", f"?tenant={theirs.name}"])),
    ("GET", "/v1/overview/live"): lambda _mine, theirs, chosen: IsolationRequest(
        chosen(["?seconds=0", f"?seconds=0&tenant={theirs.name}"])
    ),
    ("GET", "/v1/disclosures"): lambda _mine, theirs, chosen: IsolationRequest(
        chosen(["", f"?run={chosen(theirs.runs or ['run_0'])}", f"?tenant={theirs.name}", f"?user={theirs.word}"])
    ),
    ("GET", "/v1/shadows/report"): lambda _mine, _theirs, _: IsolationRequest("?tier=baton-mini"),
    ("GET", "/v1/approvals"): _name_nothing,
    ("GET", "/v1/approvals/{approval}"): _name_nothing,
    ("POST", "/v1/approvals/{approval}"): lambda mine, _theirs, _: IsolationRequest(
        "", DECISION | {"reason": mine.word}
    ),
    ("GET", "/v1/runs"): _list,
    ("GET", "/v1/runs/live"): lambda _mine, theirs, chosen: IsolationRequest(
        chosen(["?seconds=0", "?seconds=0&include=workers&include=preview", f"?seconds=0&tenant={theirs.name}"])
    ),
    ("GET", "/v1/runs/{run}"): _name_nothing,
    ("DELETE", "/v1/runs/{run}"): _name_nothing,
    ("POST", "/v1/runs/{run}/cancel"): lambda _mine, _theirs, _: IsolationRequest("", {}),
    ("GET", "/v1/runs/{run}/compare/{other}"): _name_nothing,
    ("GET", "/v1/runs/{run}/events"): _name_nothing,
    ("GET", "/v1/runs/compare"): lambda mine, theirs, chosen: IsolationRequest(
        f"?a={chosen(theirs.runs or ['run_0'])}&b={chosen([*mine.runs, *theirs.runs] or ['run_0'])}"
    ),
    ("GET", "/v1/runs/{run}/events/stream"): lambda _mine, _theirs, _: IsolationRequest("?seconds=0"),
    ("GET", "/v1/runs/{run}/explain"): _name_nothing,
    ("GET", "/v1/runs/{run}/graph"): _name_nothing,
    ("GET", "/v1/runs/{run}/timeline"): _name_nothing,
    ("GET", "/v1/runs/{run}/state"): _name_nothing,
    ("GET", "/v1/runs/{run}/views"): lambda _mine, _theirs, chosen: IsolationRequest(chosen(["", "?step=0"])),
    ("POST", "/v1/runs/{run}/feedback"): lambda mine, _theirs, _: IsolationRequest(
        "", {"score": 1.0, "comment": mine.word}
    ),
    ("GET", "/v1/runs/{run}/proof"): _name_nothing,
    ("POST", "/v1/runs/{run}/replay"): lambda _mine, _theirs, _: IsolationRequest("", {}),
    ("GET", "/v1/runs/{run}/steps/{n}"): _name_nothing,
    ("GET", "/v1/runs/{run}/stream"): _name_nothing,
}
