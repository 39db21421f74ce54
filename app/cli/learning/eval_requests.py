"""The requests of `baton eval`: each task goes to each arm several times, and each request makes one row.

The service may be anywhere: this module is a client like any other. Every request has its own `Idempotency-Key`, so
that one that is sent again, in this process or after a restart, gets the same run and is not paid for twice. A request
that is refused before a run begins (rate, capacity, a proxy's error) is sent again; the outcome of a run is final. Only
a run that was cancelled while this command was not there is replaced by another one.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
from msgspec import Struct
from msgspec.structs import asdict

from app.cli.learning.task_set import GradedTask
from app.errors import RunCancelled, ServiceUnavailable
from app.lab.grading import VERSION
from app.lab.measurements import OUTAGE_CODES, OUTAGE_STATUS, Figures, Measure, Outcome, figures

RETRY_SECONDS = 120.0
"""Seconds for which a request is sent again while the service is unreachable or refuses new work."""
RETRIED_STATUS = (408, 429, 502, 503, 504)
"""Of replies without a run: the service refuses new work, or a proxy in front of it does not reach it."""
MAX_WAIT_SECONDS = 15.0
READ_SECONDS = 30.0
"""Seconds for reading a run's journal."""
AWAITING_APPROVAL = "awaiting_approval"
"""The state of a run whose reply has a sentence for its caller in place of an answer."""


class Experiment(Struct, frozen=True):
    """The tasks, arms and limits of an evaluation. `options` are further fields of requests; `deadline` is in
    seconds."""

    id: str
    tasks: tuple[GradedTask, ...]
    arms: tuple[str, ...]
    repeats: int
    digest: str
    catalog: str
    concurrency: int = 8
    deadline: float = 330.0
    usd: float | None = None
    """Dollars after which no request is begun; requests that are under way are still paid for."""
    options: Mapping[str, Any] = {}

    def places(self) -> Iterator[tuple[GradedTask, str, int]]:
        """Yield task, arm and repeat, with all arms of a task in turn, so that changes over time affect all arms
        alike."""
        for repeat in range(self.repeats):
            for task in self.tasks:
                for arm in self.arms:
                    yield task, arm, repeat


class Bench(Struct, frozen=True):
    """A client with its key, and two clocks in seconds: `tick` is monotonic, `now` counts from 1970."""

    client: httpx.AsyncClient
    tick: Callable[[], float]
    now: Callable[[], float]


async def carry_out(
    bench: Bench,
    experiment: Experiment,
    measures: Mapping[tuple[str, str, int], Measure],
    take: Callable[[Measure], None],
) -> None:
    """Send the requests that `measures` has no row of, several at a time. `take` gets each row. Raises
    `ServiceUnavailable`."""
    spent_usd, is_over_budget = sum(row.usd for row in measures.values()), False
    missing = []
    for task, arm, repeat in experiment.places():
        if (task.id, arm, repeat) not in measures:
            missing.append((task, arm, repeat))
    places = iter(missing)

    async def one_after_the_other() -> None:
        nonlocal spent_usd, is_over_budget
        for task, arm, repeat in places:
            if experiment.usd is not None and spent_usd >= experiment.usd:
                is_over_budget = True
                return
            row = await _measure(bench, experiment, task, arm, repeat)
            spent_usd += row.usd
            take(row)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(experiment.concurrency):
                group.create_task(one_after_the_other())
    except BaseExceptionGroup as failures:
        raise _find_expected_error(failures) from None
    if is_over_budget:
        raise ServiceUnavailable("The money of --usd is spent. The rows are kept; a larger --usd goes on from them.")


def _find_expected_error(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first `ServiceUnavailable` of a group; a group without one is returned itself."""
    for exception in failures.exceptions:
        if isinstance(exception, ServiceUnavailable):
            return exception
    return failures


async def _measure(bench: Bench, experiment: Experiment, task: GradedTask, arm: str, repeat: int) -> Measure:
    began = bench.tick()
    reply = await _final_reply(bench, experiment, task, arm, repeat)
    wall = bench.tick() - began
    run, run_figures, seconds = "", Figures(), wall
    if reply is not None:
        run = reply.headers.get("x-baton-run", "")
    if run:
        run_figures, seconds = await _figures(bench, run)
    if reply is not None and "idempotent-replayed" in reply.headers:
        wall = seconds  # an earlier process sent it, and ended before it wrote the row
    if run and run_figures.catalog != experiment.catalog:
        raise ServiceUnavailable("The pool was changed while it was being evaluated; start again in another folder.")
    right, outcome, reason = await _verdict(task, reply)
    return Measure(
        **asdict(run_figures),
        task=task.id,
        arm=arm,
        repeat=repeat,
        right=right,
        outcome=outcome,
        reason=reason,
        run=run,
        wall=round(wall, 6),
        tasks=experiment.digest,
        grading=VERSION,
        at=bench.now(),
    )


async def _verdict(task: GradedTask, reply: httpx.Response | None) -> tuple[float, Outcome, str]:
    """Return grade, outcome and reason. A reply without an answer counts as wrong."""
    if reply is None:
        return 0.0, "failed", "too_late"
    if reply.status_code in OUTAGE_STATUS or _code(reply) in OUTAGE_CODES:
        return 0.0, "outage", _code(reply)
    if reply.status_code != 200:
        return 0.0, "failed", _code(reply)
    body = reply.json()
    if body.get("baton", {}).get("state") == AWAITING_APPROVAL:
        return 0.0, "outage", AWAITING_APPROVAL
    answer = body["choices"][0]["message"]["content"] or ""
    grade = await asyncio.to_thread(task.grader.grade, answer)
    return grade.score, "answered", grade.reason


async def _final_reply(
    bench: Bench, experiment: Experiment, task: GradedTask, arm: str, repeat: int
) -> httpx.Response | None:
    """Send a request until it gets a final reply, which is returned; None if it did not arrive in time. By then the
    run is over, so the request is sent once more: its key brings the run's reply."""
    name = hashlib.sha256(f"{task.id}\0{arm}\0{repeat}".encode()).hexdigest()[:32]
    key = f"eval-{experiment.id}-{name}"
    body = {"model": arm, "messages": list(task.messages), **experiment.options}
    until, pause = bench.tick() + RETRY_SECONDS, 0.5
    was_too_late = False
    while True:
        reply: httpx.Response | None = None
        try:
            async with asyncio.timeout(experiment.deadline):
                headers = {"idempotency-key": key}
                reply = await bench.client.post("/v1/chat/completions", json=body, headers=headers, timeout=None)
        except TimeoutError:
            if was_too_late:
                return None
            was_too_late = True
            continue
        except httpx.TransportError:
            pass
        if reply is not None and ("x-baton-run" in reply.headers or reply.status_code not in RETRIED_STATUS):
            _raise_refusal(reply, arm, experiment.options)
            if was_too_late or not _was_left(reply):
                return reply
            key += "-again"
            continue
        if bench.tick() > until:
            words = "cannot be reached"
            if reply is not None:
                words = f"refuses new work ({_code(reply)})"
            raise ServiceUnavailable(f"The service {words}; the rows so far are kept, run the same command to go on.")
        seconds = pause
        if reply is not None and reply.headers.get("retry-after", "").isdecimal():
            seconds = float(reply.headers["retry-after"])
        await asyncio.sleep(min(seconds, MAX_WAIT_SECONDS))
        pause *= 2


def _was_left(reply: httpx.Response) -> bool:
    """Return whether an earlier process sent this request and its run was cancelled then, which says nothing about the
    arm."""
    return "idempotent-replayed" in reply.headers and _code(reply) == RunCancelled.code


def _raise_refusal(reply: httpx.Response, arm: str, options: Mapping[str, Any]) -> None:
    """Raise `ServiceUnavailable` for a reply that shows a fault of the command and not of the arm. An option of the
    evaluation that the service refuses is one; what an arm cannot do, such as more steps than its tier has, is none."""
    if reply.status_code in (401, 403, 404):
        raise ServiceUnavailable(
            f"The service refuses {arm}: {_code(reply)}; check the key, its tiers, and GET /v1/models."
        )
    if reply.status_code in (400, 422) and "x-baton-run" not in reply.headers:
        parameter = _error_field(reply, "param")
        if parameter.partition(".")[0] in options:
            raise ServiceUnavailable(
                f"The service refuses {parameter}: {_code(reply)}; give another value, and another folder for --out."
            )


async def _figures(bench: Bench, run: str) -> tuple[Figures, float]:
    """Return a run's figures, and the seconds from its admission to its end."""
    try:
        reply = await bench.client.get(f"/v1/runs/{run}", timeout=READ_SECONDS)
    except httpx.HTTPError:
        raise ServiceUnavailable("The journal cannot be read; run the same command to go on.") from None
    if reply.status_code in RETRIED_STATUS:
        raise ServiceUnavailable(f"The journal cannot be read: {_code(reply)}; run the same command to go on.")
    if reply.status_code != 200:
        raise ServiceUnavailable(f"The journal cannot be read: {_code(reply)}; the key needs the scope runs:read.")
    record = reply.json()
    return figures(record), (record["ended_at"] or record["created_at"]) - record["created_at"]


def _code(reply: httpx.Response) -> str:
    return _error_field(reply, "code") or f"status {reply.status_code}"


def _error_field(reply: httpx.Response, name: str) -> str:
    """Return a field of the error in a reply, at most 64 characters; empty if there is none."""
    try:
        return str(reply.json()["error"][name] or "")[:64]
    except (ValueError, KeyError, TypeError):
        return ""
