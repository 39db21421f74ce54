"""Carrying plans out: each is posted with its task to a running Baton, whose executor is that of real requests.

A plan that cannot be read is malformed and costs no request. A worker's outage or refusal, a question that is too long,
a full gateway, a fallback, another worker in place of the planned one and a wait for an approval say nothing about the
plan: they give no verdict. What is wrong with the request itself (a key, a tier, a pool that the Baton does not have)
raises, for every further plan would fail alike.

With a `PlanCache` the same plan is carried out once for the same question; its verdict and its modelled cost count each
time. So a training that is repeated with other settings pays for new plans only.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx
from msgspec import Struct
from msgspec.structs import asdict, replace

from app.core.plan.proposals import read_plan_text
from app.core.plan.workflow import Step, critical_path_seconds
from app.errors import ConfigInvalid, RunTooLong
from app.lab.grading import Grader, UnitTests
from app.lab.reward import Verdict
from app.lab.rollouts import RIGHT
from app.lab.training_questions import Question
from app.lab.training_record import digest
from app.network.http_client import async_client

OVER_BUDGET = "run_over_budget"
"""The one error that is the plan's own: it costs more than a run may."""
SUCCEEDED = "succeeded"
LATER = frozenset({408, 429, 499})
BEGINNING = '{"plan": "'
"""Every line of a `PlanCache` begins like this."""


class PlanResult(Struct, frozen=True):
    """The result of a plan that was executed: dollars of its steps' calls, and seconds of their critical path."""

    verdict: Verdict
    usd: float = 0.0
    seconds: float = 0.0
    run: str = ""
    steps: int = 0
    told: bool = False
    """A subtask by itself passes as the right answer: the conductor has solved the task instead of conducting it."""
    known: bool = False
    """It was carried out before and is known from the cache."""


class PlanCache:
    """The results of plans, by the question, the pool and the plan, in a file of JSON lines that is only added to.

    Only verdicts are kept, no outages. Workers answer at random, so what is kept is one draw of theirs.
    """

    def __init__(self, file: Path) -> None:
        """Reads what there is. `ConfigInvalid` if the file is something else."""
        self._file = file
        self._known: dict[str, PlanResult] = {}
        self._end_of_cut_line = ""
        try:
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            if text and not text.endswith("\n"):
                self._end_of_cut_line = "\n"
            for line in text.splitlines():
                if _is_cut_off(line):
                    continue
                entry = json.loads(line)
                name = entry.pop("plan")
                self._known[name] = PlanResult(**entry)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise ConfigInvalid([f"{file}: is no file of carried out plans; name another one with --cache"]) from None

    def find(self, name: str) -> PlanResult | None:
        """Return the result of a plan; None if it was not carried out yet."""
        return self._known.get(name)

    def note(self, name: str, result: PlanResult) -> None:
        """Keep what a plan came to, unless it got no verdict."""
        if result.verdict not in ("right", "wrong"):
            return
        self._known[name] = result
        with self._file.open("a", encoding="utf-8") as file:
            file.write(self._end_of_cut_line + json.dumps({"plan": name, **asdict(result)}) + "\n")
        self._end_of_cut_line = ""


def _is_cut_off(line: str) -> bool:
    """Return True for the beginning of a line of the cache, as a machine that fails or a full disk leaves it."""
    if line[: len(BEGINNING)] != BEGINNING[: len(line)]:
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


class Place(Struct, frozen=True):
    """The service that carries plans out, and the number of plans at a time."""

    url: str
    """The base URL of the service, without /v1."""
    key: str
    tier: str
    concurrency: int = 128
    deadline: float = 120.0
    """Seconds for one plan."""


class Executor:
    """A running Baton. Use it as a context, in one event loop."""

    def __init__(
        self, place: Place, transport: httpx.AsyncBaseTransport | None = None, cache: PlanCache | None = None
    ) -> None:
        """Connect to a service; `transport` takes the place of the network."""
        self._place = place
        self._cache = cache
        self._turns: dict[str, asyncio.Lock] = {}
        """Lets one of several equal plans be carried out, while the others wait to know it."""
        self._free = asyncio.Semaphore(place.concurrency)
        headers = {"Authorization": f"Bearer {place.key}"}
        self._client = async_client(
            base_url=place.url,
            headers=headers,
            connections=place.concurrency,
            timeout=httpx.Timeout(place.deadline),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._client.aclose()

    async def execute(self, question: Question, text: str) -> PlanResult:
        """Carry out what a conductor has written. `ConfigInvalid` if this Baton can carry out no such plan."""
        steps = read_plan_text(text, question.names, question.limits.steps)
        if steps is None:
            return PlanResult("malformed")
        if self._cache is None:
            result = await self._post(question, steps)
        else:
            result = await self._execute_once(question, steps, self._cache)
        return replace(result, told=_tells_answer(steps, question.rule.grader))

    async def _execute_once(self, question: Question, steps: tuple[Step, ...], cache: PlanCache) -> PlanResult:
        """Carry out a plan if it is not known yet; equal plans wait for the first of them."""
        workers = [[worker.name, worker.model, worker.price.input, worker.price.output] for worker in question.workers]
        name = digest([self._request(question, steps), workers, asdict(question.limits), question.rule.written])
        async with self._turns.setdefault(name, asyncio.Lock()):
            earlier = cache.find(name)
            if earlier is not None:
                return replace(earlier, known=True)
            result = await self._post(question, steps)
            cache.note(name, result)
            return result

    async def _post(self, question: Question, steps: tuple[Step, ...]) -> PlanResult:
        try:
            async with self._free, asyncio.timeout(self._place.deadline):
                reply = await self._client.post("/v1/chat/completions", json=self._request(question, steps))
        except (httpx.HTTPError, TimeoutError):
            return PlanResult("outage", steps=len(steps))
        return await _read_reply(reply, question, steps)

    def _request(self, question: Question, steps: tuple[Step, ...]) -> Mapping[str, Any]:
        plan = [{"worker": step.worker, "subtask": step.subtask, "access": step.access.as_list()} for step in steps]
        return {
            "model": self._place.tier,
            "messages": [dict(turn) for turn in question.rule.conversation],
            "baton": {"plan": {"steps": plan}, "pool": {"allow": question.names}},
        }


def _tells_answer(steps: tuple[Step, ...], grader: Grader) -> bool:
    """Return True if a subtask alone is graded as right. Unit tests are left out, since they would be run for each
    subtask."""
    if isinstance(grader, UnitTests):
        return False
    return any([grader.grade(step.subtask).score >= RIGHT for step in steps])


async def _read_reply(reply: httpx.Response, question: Question, steps: tuple[Step, ...]) -> PlanResult:
    if reply.status_code != httpx.codes.OK:
        return _read_refusal(reply, len(steps))
    document = reply.json()
    report = document["baton"]
    workers = [step["worker"] for step in report["steps"]]
    is_over = report["state"] == SUCCEEDED  # one that waits for an approval has no answer yet
    if not is_over or report["degraded"] or workers != [step.worker for step in steps]:
        return PlanResult("outage", run=report["run"], steps=len(steps))
    answer = document["choices"][0]["message"]["content"] or ""
    grade = await asyncio.to_thread(question.rule.grader.grade, answer)  # unit tests take seconds
    verdict: Verdict = "right" if grade.score >= RIGHT else "wrong"
    spent = [float(step_report["seconds"]) for step_report in report["steps"]]
    seconds = critical_path_seconds([step.access.steps for step in steps], spent)
    return PlanResult(verdict, float(report["cost_usd"]), seconds, report["run"], len(steps))


def _read_refusal(reply: httpx.Response, steps: int) -> PlanResult:
    try:
        error = dict(reply.json()["error"])
    except (ValueError, KeyError, TypeError):
        error = {}
    if error.get("code") == OVER_BUDGET:
        return PlanResult("wrong", steps=steps)
    is_about_question = "x-baton-run" in reply.headers or error.get("code") == RunTooLong.code
    if is_about_question or reply.status_code in LATER or reply.status_code >= 500:
        return PlanResult("outage", steps=steps)
    raise ConfigInvalid([f"this Baton cannot carry out plans for training: {error.get('message', reply.status_code)}"])
