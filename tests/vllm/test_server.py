"""A real vLLM server does all that Baton's conductor relies on, as the official client sees it.

The model is random, so nothing here is about quality. Whatever the grammar permits comes up sooner or later: these
tests are as hard on the schema as any model can be.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import openai
import pytest
from openai import DefaultHttpxClient, OpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionTokenLogprob

from tests.vllm.plan_schema import CLEAN_TEXT, check_plan, plan_schema
from tests.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STEPS: Final = 3
WORKERS: Final = (0, 1, 2, 3)
LONGEST: Final = 120
SEEDS: Final = range(12)
# One token per character is generous for text that was learned; only rare Unicode and escapes cost several tokens each.
MAX_TOKENS: Final = 64 + STEPS * (24 + LONGEST)
LENGTHS: Final = {"type": "string", "minLength": 1, "maxLength": LONGEST}
PATTERN: Final = {"type": "string", "pattern": CLEAN_TEXT % LONGEST}
MESSAGES: Final = [
    {"role": "system", "content": "You are the conductor. Answer with one JSON object." * 20},
    {"role": "user", "content": "What is the capital of France?"},
]


@dataclass(slots=True)
class Answer:
    """One collected stream."""

    text: str = ""
    pieces: int = 0
    finish_reason: str | None = None
    usage: CompletionUsage | None = None
    tokens: list[ChatCompletionTokenLogprob] = field(default_factory=list)


@pytest.fixture
def client(vllm_server: VllmServer) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=vllm_server.base_url,
        api_key="unused",
        max_retries=0,
        http_client=DefaultHttpxClient(trust_env=False, timeout=120),
    ) as client:
        yield client


def stream(client: OpenAI, model: str, **options: Any) -> Answer:
    """Collect one streamed chat completion, as a caller of the API would see it."""
    request: dict[str, Any] = {"messages": MESSAGES, "stream_options": {"include_usage": True}, "temperature": 1.0}
    answer = Answer()
    with client.chat.completions.create(model=model, stream=True, **(request | options)) as chunks:
        for chunk in chunks:
            answer.usage = chunk.usage or answer.usage
            for choice in chunk.choices:
                answer.text += choice.delta.content or ""
                answer.pieces += bool(choice.delta.content)
                answer.finish_reason = choice.finish_reason or answer.finish_reason
                answer.tokens += (choice.logprobs and choice.logprobs.content) or []
    return answer


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "plan", "strict": True, "schema": schema}}


def ask_for_plan(client: OpenAI, model: str, subtask: dict[str, Any], **options: Any) -> Answer:
    schema = plan_schema(STEPS, WORKERS, subtask)
    request = {"max_tokens": MAX_TOKENS, "response_format": response_format(schema)}
    return stream(client, model, **(request | options))


def legal(token: ChatCompletionTokenLogprob) -> dict[str, float]:
    """Probabilities of the tokens that the grammar permits here; the others are given as -9999."""
    return {other.token: math.exp(other.logprob) for other in token.top_logprobs if other.logprob > -9000}


def worker_tokens(tokens: Sequence[ChatCompletionTokenLogprob]) -> list[ChatCompletionTokenLogprob]:
    """The token right after each `"worker":`, found by the bytes, for a token may end inside a character."""
    token_counts, written = [], b""
    for token in tokens:
        if written.endswith((b'{"steps":[{"worker":', b'},{"worker":')):
            token_counts.append(token)
        written += bytes(token.bytes or [])
    return token_counts


def test_a_plain_answer_streams_token_by_token_and_ends_with_its_usage(client: OpenAI, vllm_server: VllmServer) -> None:
    answer = stream(client, vllm_server.model, max_tokens=24, seed=1, extra_body={"ignore_eos": True})
    assert answer.finish_reason == "length"
    assert answer.pieces > 5
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens > 200


@pytest.mark.parametrize("subtask", [LENGTHS, PATTERN], ids=["lengths", "pattern"])
def test_every_plan_of_a_random_model_is_valid(
    client: OpenAI, vllm_server: VllmServer, subtask: dict[str, Any]
) -> None:
    answers = [ask_for_plan(client, vllm_server.model, subtask, seed=seed) for seed in SEEDS]
    assert {answer.finish_reason for answer in answers} == {"stop"}
    plans = [check_plan(answer.text, STEPS, WORKERS, LONGEST) for answer in answers]
    subtasks = [step["subtask"] for plan in plans for step in plan]
    assert max(map(len, subtasks)) == LONGEST, "no subtask ran into the bound, so the bound was not tested"
    assert {len(plan) for plan in plans} == {1, 2, 3}
    assert {step["worker"] for plan in plans for step in plan} == set(WORKERS)
    assert {source for plan in plans for step in plan for source in step["access"]} == {"user", 0, 1}


def test_plans_are_compact_and_the_same_seed_gives_the_same_plan(client: OpenAI, vllm_server: VllmServer) -> None:
    first, again = (ask_for_plan(client, vllm_server.model, PATTERN, seed=7) for _ in range(2))
    assert first.text == again.text
    assert first.text.startswith('{"steps":[{"worker":')


def test_the_probability_of_a_workers_choice_comes_with_the_stream(client: OpenAI, vllm_server: VllmServer) -> None:
    ask = {"seed": 4, "logprobs": True, "top_logprobs": 10}
    answer = ask_for_plan(client, vllm_server.model, PATTERN, **ask)
    steps = check_plan(answer.text, STEPS, WORKERS, LONGEST)
    chosen = worker_tokens(answer.tokens)
    assert [token.token for token in chosen] == [str(step["worker"]) for step in steps]
    for token in chosen:
        assert set(legal(token)) == {str(worker) for worker in WORKERS}
        assert sum(legal(token).values()) == pytest.approx(1, abs=0.01)


def test_probabilities_are_given_before_the_temperature(client: OpenAI, vllm_server: VllmServer) -> None:
    """So they are the true probability of a sampled choice at temperature 1 and top_p 1 only."""
    ask = {"seed": 4, "logprobs": True, "top_logprobs": 10, "max_tokens": 8}
    warm, cold = (
        ask_for_plan(client, vllm_server.model, PATTERN, temperature=temperature, **ask) for temperature in (1.0, 0.2)
    )
    assert legal(worker_tokens(warm.tokens)[0]) == pytest.approx(legal(worker_tokens(cold.tokens)[0]), abs=0.01)


def test_a_plan_cut_off_by_max_tokens_says_so(client: OpenAI, vllm_server: VllmServer) -> None:
    answer = ask_for_plan(client, vllm_server.model, LENGTHS, seed=0, max_tokens=8)
    assert answer.finish_reason == "length"
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        check_plan(answer.text, STEPS, WORKERS, LONGEST)


@pytest.mark.parametrize("word", [{"uniqueItems": True}, {"contains": {"const": "user"}}], ids=["unique", "contains"])
def test_what_the_grammar_cannot_enforce_is_refused_inside_the_stream(
    client: OpenAI, vllm_server: VllmServer, word: dict[str, Any]
) -> None:
    """With status 200 and the error as the first event: a client that looks at the status only would miss it."""
    array = {"type": "array", "items": {"enum": ["user", 0]}, **word}
    schema = {"type": "object", "additionalProperties": False, "required": ["a"], "properties": {"a": array}}
    with pytest.raises(openai.APIError, match="Unimplemented keys") as refused:
        stream(client, vllm_server.model, max_tokens=20, response_format=response_format(schema))
    assert not isinstance(refused.value, openai.APIStatusError)
