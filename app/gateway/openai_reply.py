"""The replies of `POST /v1/chat/completions`: the completion object, its chunks, and the `baton` field of both.

`usage` keeps OpenAI's identity over what the caller can see; the orchestration stands beside it (DESIGN §6). Chunks
of a stream are cut from one template, so that a delta costs the encoding of its text and nothing else.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from app.core.bill import Bill
from app.core.chat import Usage
from app.core.pool import MILLION
from app.core.state import RunState, StepState
from app.order import Ended, Noted


def dollars(micro: int) -> float:
    """Micro-dollars as a decimal number of dollars."""
    return micro / MILLION


def usage_of(bill: Bill) -> dict[str, Any]:
    """OpenAI's `usage`: total = prompt + completion, and visible + orchestration = the journal's sum."""
    visible, rest = bill.visible, bill.orchestration
    return {
        "prompt_tokens": visible.input,
        "completion_tokens": visible.output,
        "total_tokens": visible.input + visible.output,
        "prompt_tokens_details": {
            "cached_tokens": visible.cached,
            "orchestration_input_tokens": rest.input,
            "orchestration_input_cached_tokens": rest.cached,
        },
        "completion_tokens_details": {
            "reasoning_tokens": visible.reasoning,
            "orchestration_output_tokens": rest.output,
        },
    }


def figures(usage: Usage) -> dict[str, int | bool]:
    """A `Usage` as it stands in `baton`."""
    return {
        "input": usage.input,
        "cached": usage.cached,
        "output": usage.output,
        "reasoning": usage.reasoning,
        "estimated": usage.estimated,
    }


def extension(ended: Ended, rehearsal: bool) -> dict[str, Any]:
    """The `baton` field of a reply."""
    state = ended.state
    proposal = state.proposal
    field: dict[str, Any] = {
        "run": state.run,
        "tier": state.admitted.tier,
        "state": state.state,
        "topology": proposal.topology if proposal else None,
        "conductor": proposal.conductor if proposal else state.admitted.conductor,
        "degraded": state.degraded,
        "proposals": proposals(state),
        "steps": [step_figures(state, step) for step in state.steps.values()],
        "usage": figures(ended.bill.total),
        "cost_usd": dollars(ended.bill.usd),
        "audit": f"/v1/runs/{state.run}",
    }
    if rehearsal:
        field["rehearsal"] = True
    return field


def proposals(state: RunState) -> list[dict[str, Any]]:
    """What was proposed, and what became of it."""
    return [
        {"mode": one.mode, "conductor": one.conductor, "state": one.state, "reasons": list(one.reasons)}
        for one in state.proposals
    ]


def step_figures(state: RunState, step: StepState) -> dict[str, Any]:
    """One step with the sum over its attempts."""
    calls = [call for call in state.calls.values() if call.step == step.n]
    return {
        "n": step.n,
        "worker": step.worker,
        "access": step.access.as_list(),
        "state": step.state,
        "usage": figures(sum((call.usage for call in calls), Usage())),
        "cost_usd": dollars(sum(call.usd for call in calls)),
        "seconds": sum(call.seconds for call in calls),
    }


def completion(ended: Ended, created: int, rehearsal: bool) -> bytes:
    """A whole `chat.completion`."""
    state = ended.state
    message = {"role": "assistant", "content": ended.answer, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": ended.finish or "stop"}
    return orjson.dumps(
        {
            "id": f"chatcmpl-{state.run}",
            "object": "chat.completion",
            "created": created,
            "model": state.admitted.tier,
            "choices": [choice],
            "usage": usage_of(ended.bill),
            "service_tier": "default",
            "system_fingerprint": None,
            "baton": extension(ended, rehearsal),
        }
    )


class Chunks:
    """The frames of one stream. With `usage` every chunk but the last says `usage: null`, as OpenAI's do."""

    def __init__(self, run: str, tier: str, created: int, *, usage: bool, rehearsal: bool) -> None:
        start = {
            "id": f"chatcmpl-{run}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": tier,
            "service_tier": "default",
            "system_fingerprint": None,
        }
        self._head = b"data: " + orjson.dumps(start)[:-1]
        self._null = b',"usage":null' if usage else b""
        self._usage = usage
        self._rehearsal = rehearsal
        self._said = self._head + b',"choices":[{"index":0,"delta":{"content":'
        self._said_end = b'},"logprobs":null,"finish_reason":null}]' + self._null + b"}\n\n"

    def role(self) -> bytes:
        """The first chunk."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk(delta, None, b"")

    def said(self, text: str) -> bytes:
        """More of the answer."""
        return self._said + orjson.dumps(text) + self._said_end

    def noted(self, noted: Noted) -> bytes:
        """A step's event, on a chunk whose delta is empty: clients that do not know `baton` see nothing new in it."""
        return self._chunk({}, None, _baton({"event": noted.kind, **noted.body}))

    def ended(self, ended: Ended) -> bytes:
        """The chunk with the finish reason, the usage chunk if asked for, and the terminal marker."""
        last = self._chunk({}, ended.finish or "stop", _baton(extension(ended, self._rehearsal)))
        if self._usage:
            last += self._head + b',"choices":[],"usage":' + orjson.dumps(usage_of(ended.bill)) + b"}\n\n"
        return last + b"data: [DONE]\n\n"

    def _chunk(self, delta: Mapping[str, object], finish: str | None, more: bytes) -> bytes:
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
        return self._head + b',"choices":' + orjson.dumps(choices) + self._null + more + b"}\n\n"


def _baton(field: Mapping[str, object]) -> bytes:
    return b',"baton":' + orjson.dumps(field)


def failed(error: Mapping[str, object]) -> bytes:
    """The frame that ends a stream which went wrong after its first byte."""
    return b"data: " + orjson.dumps(error) + b"\n\n"
