"""One function per figure of DESIGN.md, section 10. Each takes one target and measures one round of it.

A figure is the median of its rounds. Added latency is against the upstream called directly in the same round, because
wall-clock figures on a shared machine drift; `__main__` interleaves the rounds of two trees for the same reason.
"""

from __future__ import annotations

import re
import statistics
import time

from msgspec import Struct
from msgspec.structs import replace

from . import commits
from .held import hold_streams
from .load import Load, Report, run
from .processes import DidNotStart, cpu_seconds, run_to_end
from .stalls import longest_stall
from .subject import SATURATED_SLOTS, Target, Tree, fan_out, one_step, one_two_one
from .tool_loop import TURNS, NoToolCall, measure_turns

LEVELS = 3
"""Steps on the critical path of 1-2-1."""
SETTLE = 3.0
"""Seconds until the memory of newly opened streams has been allocated."""
TALKER_CHUNKS = 100
"""Chunks in one answer of the worker `talker` of `subject.py`."""
COUNTED_RUNS = 20
"""Runs over which commits are counted."""
SATURATED_RUNS = 8
"""Runs at a time of four ready steps each: twice as many as `SATURATED_SLOTS`."""
SATURATED_STEP_SECONDS = 0.2
"""How long the worker of `fan_out` takes for a step: the slots are the limit, and not the processor."""
SATURATED_STEPS = 5
"""Steps of one run of `fan_out`."""
WARM_UP_SECONDS = 1.0
_JOURNAL = re.compile(r"([\d,]+) events/s.*worst wait beyond one write ([\d.]+) ms", re.DOTALL)
_HOP = re.compile(r'"p50": ([\d.]+)')


class ScenarioError(RuntimeError):
    """The target answered with errors, so that there is no figure."""


class Effort(Struct, frozen=True):
    """The length of a measurement: seconds per round, and rounds."""

    seconds: float = 5.0
    rounds: int = 3
    idle_streams: int = 200

    @property
    def warm_up(self) -> Effort:
        """A short round, whose figure does not count."""
        return replace(self, seconds=min(WARM_UP_SECONDS, self.seconds))


def _ask(target: Target, body: str, worker: str, connections: int, seconds: float, requests: int = 0) -> Report:
    load = Load(
        url=target.address(worker),
        body=body,
        connections=connections,
        seconds=seconds,
        requests=requests,
        headers=target.headers,
    )
    report = run(load)
    if report.errors or not report.requests:
        raise ScenarioError(f"{target.name}: {report.statuses} {report.first_error}")
    return report


def _cpu_ms_per_request(target: Target, body: str, worker: str, connections: int, seconds: float) -> float:
    before = cpu_seconds(target.processes)
    report = _ask(target, body, worker, connections, seconds)
    return (cpu_seconds(target.processes) - before) * 1000 / report.requests


def one_step_cpu(target: Target, effort: Effort) -> float:
    """CPU ms per non-streaming request at 16 connections, over a worker that answers at once."""
    return _cpu_ms_per_request(target, one_step("fast"), "fast", 16, effort.seconds)


def measure_added_latency(target: Target, direct: Target, connections: int, rank: str, effort: Effort) -> float:
    """Added ms over a 50 ms worker; `rank` is p50 or p99."""
    request = one_step("slow")
    floor = _ask(direct, request, "slow", connections, effort.seconds / 2).latency_ms[rank]
    return _ask(target, request, "slow", connections, effort.seconds).latency_ms[rank] - floor


def workflow_added_per_step(target: Target, direct: Target, effort: Effort) -> float:
    """Added ms per step on the critical path of 1-2-1 with 20 ms workers, one run at a time, p50."""
    request = one_two_one()
    floor = _ask(direct, request, "a", 1, effort.seconds / 2).latency_ms["p50"]
    return (_ask(target, request, "a", 1, effort.seconds).latency_ms["p50"] - LEVELS * floor) / LEVELS


def workflow_cpu(target: Target, effort: Effort, runs: int = 64) -> float:
    """CPU ms per 1-2-1 run at so many concurrent runs."""
    return _cpu_ms_per_request(target, one_two_one(), "a", runs, effort.seconds)


def tool_turn_added(target: Target, direct: Target, effort: Effort, *, stream: bool) -> float:
    """Added ms of a turn that brings back a tool's result and calls the next tool, over a 20 ms worker, p50."""
    try:
        floor = statistics.median(measure_turns(direct, "caller", effort.seconds / 2, stream=stream))
        return statistics.median(measure_turns(target, "caller", effort.seconds, stream=stream)) - floor
    except NoToolCall as problem:
        raise ScenarioError(f"{target.name}: {problem}") from problem


def tool_turn_cpu(target: Target, effort: Effort) -> float:
    """CPU ms of a turn that brings back a tool's result and calls the next tool; the few first turns count as well."""
    before = cpu_seconds(target.processes)
    times = measure_turns(target, "caller", effort.seconds, stream=False)
    return (cpu_seconds(target.processes) - before) * 1000 / (len(times) * (TURNS + 1) / TURNS)


def stream_rate(target: Target, effort: Effort) -> float:
    """Chunks of the upstream relayed per second over 128 streams; a busy relay may join several in one event."""
    return _ask(target, one_step("talker", True), "talker", 128, effort.seconds).requests_per_s * TALKER_CHUNKS


def measure_added_first_token(target: Target, direct: Target, effort: Effort) -> float:
    """Added ms to the first token at 16 streams, p50."""
    request = one_step("talker", True)
    floor = _ask(direct, request, "talker", 16, effort.seconds / 2).ttft_ms["p50"]
    return _ask(target, request, "talker", 16, effort.seconds).ttft_ms["p50"] - floor


def commits_per_run(target: Target, body: str) -> float:
    """Writing transactions per run, one run at a time, so that no two runs share a commit."""
    for _ in range(3):
        before = commits.read(target.database)
        report = _ask(target, body, "", connections=1, seconds=30.0, requests=COUNTED_RUNS)
        try:
            return commits.read(target.database).since(before) / report.requests
        except commits.WalRestartError:
            continue
    raise ScenarioError(f"{target.name}: the write-ahead log is restarted too often to count its commits")


def one_step_commits(target: Target) -> float:
    """Writing transactions of a one-step run."""
    return commits_per_run(target, one_step("fast"))


def workflow_commits(target: Target) -> float:
    """Writing transactions of a 1-2-1 run."""
    return commits_per_run(target, one_two_one())


def measure_saturated_use(target: Target, effort: Effort) -> float:
    """Percent of the time of all step slots that workers were at work, with twice as many ready steps as slots."""
    report = _ask(target, fan_out(), "", SATURATED_RUNS, effort.seconds)
    return 100 * report.requests_per_s * SATURATED_STEPS * SATURATED_STEP_SECONDS / SATURATED_SLOTS


def measure_saturated_cpu(target: Target, effort: Effort) -> float:
    """CPU ms per run of five steps, with twice as many ready steps as slots."""
    return _cpu_ms_per_request(target, fan_out(), "", SATURATED_RUNS, effort.seconds)


def measure_saturated_latency(target: Target, rank: str, effort: Effort) -> float:
    """Return the milliseconds that a run of five steps takes, with twice as many ready steps as slots."""
    return _ask(target, fan_out(), "", SATURATED_RUNS, effort.seconds).latency_ms[rank]


def stall(target: Target) -> float:
    """Return the longest time in ms that a bad body keeps everybody else waiting."""
    try:
        return longest_stall(target)[0]
    except RuntimeError as problem:
        raise ScenarioError(str(problem)) from problem


def idle_memory(target: Target) -> float:
    """Resident MiB of the gateway before any load."""
    return target.processes[0].rss_bytes() / 2**20


def memory_per_idle_stream(target: Target, effort: Effort) -> float:
    """Resident KiB of the gateway per open stream whose worker has sent nothing yet: the slope of the second half."""
    load = Load(url=target.address("idle"), body=one_step("idle", True), headers=target.headers)
    gateway = target.processes[0]
    with hold_streams(load, effort.idle_streams):
        time.sleep(SETTLE)
        before = gateway.rss_bytes()
        with hold_streams(load, effort.idle_streams):
            time.sleep(SETTLE)
            return (gateway.rss_bytes() - before) / 1024 / effort.idle_streams


def cpu_ratio(target: Target, reference: Target, effort: Effort) -> float:
    """CPU per one-step request as a multiple of the reference's, one after the other."""
    half = replace(effort, seconds=effort.seconds / 2)
    return one_step_cpu(target, half) / one_step_cpu(reference, half)


def queue_hop(redis_url: str, tree: Tree | None = None, *, count: int = 2000) -> float:
    """Median milliseconds of so many tickets from the sending to the arrival of the answer, over Redis, between two
    processes."""
    words = ("--redis", redis_url, "--count", str(count))
    return float(_match_or_fail(_HOP, _print_figures(tree, "tests.bench.hop", *words))[1])


def journal(database_url: str, effort: Effort, tree: Tree | None = None) -> tuple[float, float]:
    """Events per second with 256 writers, and the worst wait for a batch beyond one write in ms."""
    words = (database_url, "--writers", "256", "--seconds", str(effort.seconds))
    figures = _match_or_fail(_JOURNAL, _print_figures(tree, "tests.bench.journal", *words))
    return float(figures[1].replace(",", "")), float(figures[2])


def _match_or_fail(pattern: re.Pattern[str], output: str) -> re.Match[str]:
    match = pattern.search(output)
    if match is None:
        raise ScenarioError(output)
    return match


def _print_figures(tree: Tree | None, module: str, *words: str) -> str:
    ran = tree or Tree()
    try:
        return run_to_end(ran.command(module, *words), env=ran.environ, folder=ran.root)
    except DidNotStart as problem:
        raise ScenarioError(str(problem).strip().rpartition("\n")[2]) from problem
