"""One function per figure of DESIGN.md, section 10. Each takes what is running and returns a number in the unit of
its budget.

Added latency is always against the upstream called directly in the same minute: the two are interleaved, round by
round, and the median of the rounds counts, because wall figures on a shared machine drift.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from .held import held
from .load import Load, Report, run
from .processes import ROOT, cpu_seconds
from .stalls import longest_stall
from .subject import Target, one_step, one_two_one
from .talk import Lost, turns

LEVELS = 3
"""Steps on the critical path of 1-2-1."""


SETTLE = 3.0
_JOURNAL = re.compile(r"([\d,]+) events/s.*worst wait beyond one write ([\d.]+) ms", re.DOTALL)


TALKER_CHUNKS = 100
"""What the worker `talker` of `subject.py` says in one answer."""


class Failed(RuntimeError):
    """The target answered with errors, so that there is no figure."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: seconds per round, and rounds."""

    seconds: float = 5.0
    rounds: int = 3
    idle_streams: int = 200


def _asked(target: Target, body: str, worker: str, connections: int, seconds: float) -> Report:
    load = Load(url=target.address(worker), body=body, connections=connections, seconds=seconds, headers=target.headers)
    report = run(load)
    if report.errors or not report.requests:
        raise Failed(f"{target.name}: {report.statuses} {report.first_error}")
    return report


def _cpu_ms_per_request(target: Target, body: str, worker: str, connections: int, effort: Effort) -> float:
    _asked(target, body, worker, connections, 1.0)
    figures = []
    for _ in range(effort.rounds):
        before = cpu_seconds(target.processes)
        report = _asked(target, body, worker, connections, effort.seconds)
        figures.append((cpu_seconds(target.processes) - before) * 1000 / report.requests)
    return statistics.median(figures)


def _added(
    target: Target,
    direct: Target,
    body: str,
    worker: str,
    connections: int,
    effort: Effort,
    figure: Callable[[Report], float],
    times: int = 1,
) -> float:
    """Median over the rounds of (target - times * direct)."""
    _asked(target, body, worker, connections, 1.0)
    added = []
    for _ in range(effort.rounds):
        floor = figure(_asked(direct, body, worker, connections, effort.seconds / 2))
        added.append(figure(_asked(target, body, worker, connections, effort.seconds)) - times * floor)
    return statistics.median(added)


def one_step_cpu(target: Target, effort: Effort) -> float:
    """CPU ms per non-streaming request at 16 connections, over a worker that answers at once."""
    return _cpu_ms_per_request(target, one_step("fast"), "fast", 16, effort)


def added_latency(target: Target, direct: Target, connections: int, rank: str, effort: Effort) -> float:
    """Added ms over a 50 ms worker; `rank` is p50 or p99."""
    return _added(target, direct, one_step("slow"), "slow", connections, effort, lambda report: report.latency_ms[rank])


def workflow_added_per_step(target: Target, direct: Target, effort: Effort) -> float:
    """Added ms per step on the critical path of 1-2-1 with 20 ms workers, one run at a time, p50."""
    added = _added(target, direct, one_two_one(), "a", 1, effort, lambda report: report.latency_ms["p50"], LEVELS)
    return added / LEVELS


def workflow_cpu(target: Target, effort: Effort) -> float:
    """CPU ms per 1-2-1 run at 64 concurrent runs."""
    return _cpu_ms_per_request(target, one_two_one(), "a", 64, effort)


def tool_turn_added(target: Target, direct: Target, effort: Effort, *, stream: bool) -> float:
    """Added ms of a turn that brings back a tool's result and calls the next tool, over a 20 ms worker, p50."""
    try:
        turns(target, "caller", 1.0, stream=stream)
        added = []
        for _ in range(effort.rounds):
            floor = statistics.median(turns(direct, "caller", effort.seconds / 2, stream=stream))
            added.append(statistics.median(turns(target, "caller", effort.seconds, stream=stream)) - floor)
    except Lost as problem:
        raise Failed(f"{target.name}: {problem}") from problem
    return statistics.median(added)


def stream_rate(target: Target, effort: Effort) -> float:
    """Chunks of the upstream relayed per second over 128 streams; a busy relay may join several in one event."""
    _asked(target, one_step("talker", True), "talker", 16, 1.0)
    reports = [_asked(target, one_step("talker", True), "talker", 128, effort.seconds) for _ in range(effort.rounds)]
    return statistics.median(report.requests_per_s * TALKER_CHUNKS for report in reports)


def added_first_token(target: Target, direct: Target, effort: Effort) -> float:
    """Added ms to the first token at 16 streams, p50."""
    asked = one_step("talker", True)
    return _added(target, direct, asked, "talker", 16, effort, lambda report: report.ttft_ms["p50"])


def stall(target: Target) -> float:
    """The longest time in ms that a bad body keeps everybody else waiting."""
    try:
        return longest_stall(target)[0]
    except RuntimeError as problem:
        raise Failed(str(problem)) from problem


def idle_memory(target: Target) -> float:
    """Resident MiB of the gateway before any load."""
    return target.processes[0].rss_bytes() / 2**20


def memory_per_idle_stream(target: Target, effort: Effort) -> float:
    """Resident KiB of the gateway per open stream whose worker has said nothing yet: the slope of the second half."""
    load = Load(url=target.address("idle"), body=one_step("idle", True), headers=target.headers)
    gateway = target.processes[0]
    with held(load, effort.idle_streams):
        time.sleep(SETTLE)
        before = gateway.rss_bytes()
        with held(load, effort.idle_streams):
            time.sleep(SETTLE)
            return (gateway.rss_bytes() - before) / 1024 / effort.idle_streams


def cpu_ratio(target: Target, reference: Target, effort: Effort) -> float:
    """CPU per one-step request as a multiple of the reference's, the two interleaved."""
    short = Effort(effort.seconds / 2, 1)
    ratios = [one_step_cpu(target, short) / one_step_cpu(reference, short) for _ in range(effort.rounds)]
    return statistics.median(ratios)


def queue_hop(redis_url: str, rank: str = "p50") -> float:
    """Milliseconds from ringing a ticket to hearing its answer, over Redis, between two processes."""
    return float(json.loads(_printed("tests.bench.hop", "--redis", redis_url))[rank])


def journal(database_url: str, effort: Effort) -> tuple[float, float]:
    """Events per second with 256 writers, and the worst wait for a batch beyond one write in ms."""
    shown = _printed("tests.bench.journal", database_url, "--writers", "256", "--seconds", str(effort.seconds))
    found = _JOURNAL.search(shown)
    if found is None:
        raise Failed(shown)
    return float(found[1].replace(",", "")), float(found[2])


def _printed(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    answer = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=300)
    if answer.returncode:
        raise Failed(answer.stderr.strip().rpartition("\n")[2])
    return answer.stdout
