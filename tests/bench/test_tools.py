"""The bench's own tools: they must count right before what they count is believed."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.process.config.poolfile import parse
from tests.harness import servers
from tests.harness.waiting import PATIENCE_SECONDS, wait_until
from tests.simulation.fleet import Demand, demand

from . import commits, scaleout, tool_loop
from . import load as generator
from .figures import Figure, Subject, measure_subjects
from .held import hold_streams
from .load import Load, percentiles, run
from .processes import DidNotStart, RunningProcess, bare, cpu_seconds, run_to_end, start_process, upstream
from .scenarios import Effort, ScenarioError
from .subject import KEY, WORKERS, Target, Tree, environment, one_step, one_two_one, pool_text
from .table import Comparison, Row, compare_rows, render_table


@pytest.fixture(scope="module")
def workers() -> Iterator[RunningProcess]:
    with upstream() as running:
        yield running


def ask(url: str, *, stream: bool = False, connections: int = 2, requests: int = 6) -> generator.Report:
    """A short load from this process."""
    load = Load(url=url, body=one_step("fast", stream), connections=connections, seconds=5, requests=requests)
    return asyncio.run(generator.generate(load))


def test_counts_every_request(workers: RunningProcess) -> None:
    report = ask(f"{workers.url}/d20/v1/chat/completions")
    assert (report.requests, report.errors, report.statuses) == (6, 0, {"200": 6})
    assert 19 <= report.latency_ms["p50"] < 5000  # milliseconds; timers may be early by a tick
    assert report.events == 0
    assert report.requests_per_s > 0


@pytest.mark.parametrize("gap", [0, 200, 2000])
def test_counts_every_event(workers: RunningProcess, gap: int) -> None:
    report = ask(f"{workers.url}/d10/c20/g{gap}/v1/chat/completions", stream=True)
    assert report.requests == 6
    assert report.events == 6 * (20 + 3)
    assert 9 <= report.ttft_ms["p50"] <= report.latency_ms["p50"]


def test_events_split_between_reads_are_counted_once() -> None:
    async def count() -> int:
        tally = generator.Tally(Load(url="http://x", body="{}"))
        caller = generator.Caller(b"", tally)
        for piece in (b"da", b'ta: {"a":1}\n\nda', b"ta: {}\n\n", b"data: [DONE]\n\n"):
            caller.on_body(piece)
        return tally.events

    assert asyncio.run(count()) == 2


def test_runs_as_a_process_and_measures_cpu(workers: RunningProcess) -> None:
    before = cpu_seconds([workers])
    url = f"{workers.url}/v1/chat/completions"
    report = run(Load(url=url, body=one_step("fast"), connections=4, seconds=PATIENCE_SECONDS, requests=20))
    assert report.requests == 20
    spent = wait_until(lambda: ask(url).requests and cpu_seconds([workers]) - before, what="CPU counts in 10 ms")
    assert spent < 20
    assert workers.rss_bytes() > 2**20


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_loop_goes_on_with_every_call_and_times_what_brings_a_result(
    workers: RunningProcess, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(tool_loop, "TURNS", 3)
    times = tool_loop.measure_turns(Target("direct", workers.url, (workers,)), "caller", 0.01, stream=stream)
    assert len(times) == 3
    assert min(times) >= 19
    with pytest.raises(tool_loop.NoToolCall):
        tool_loop.measure_turns(Target("direct", workers.url, (workers,)), "fast", 0.01, stream=stream)


def test_bare_relays_both_ways(workers: RunningProcess) -> None:
    with bare(workers.url) as running:
        target = Target("bare", running.url, (running,))
        assert ask(target.address("a")).errors == 0
        report = ask(target.address("talker"), stream=True)
        assert report.events == 6 * 103


def test_errors_are_reported(workers: RunningProcess) -> None:
    with bare(workers.url) as running:
        load = Load(url=running.url, body="{}", seconds=1, requests=1)
        assert asyncio.run(generator.generate(load)).errors == 0
    load = Load(url=workers.url, body="{}", seconds=0.2)
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(generator.generate(Load(url="http://127.0.0.1:1", body="{}", seconds=1)))
    assert asyncio.run(generator.generate(load)).requests > 0


def test_a_process_that_fails_shows_its_log() -> None:
    with (
        pytest.raises(DidNotStart, match="no such thing"),
        start_process([sys.executable, "-c", "raise SystemExit('no such thing')"], port=1, within=5),
    ):
        pass


def test_held_streams(workers: RunningProcess) -> None:
    with hold_streams(Load(url=f"{workers.url}/d60000/v1/chat/completions", body=one_step("idle", True)), 5):
        assert ask(f"{workers.url}/v1/chat/completions").errors == 0


def test_percentiles() -> None:
    assert percentiles([]) == {}
    assert percentiles(list(range(1, 101))) == {"p50": 50, "p95": 95, "p99": 99, "max": 100}


def test_table() -> None:
    rows = [Row("a", 1, "ms", 0.5), Row("b", 10, "/s", 5.0, better="higher"), Row("c", 1, "ms", None, "pending")]
    assert [row.verdict for row in rows] == ["met", "MISSED", "-"]
    assert Row("d", None, "ms", 5.0).verdict == "-"
    assert len({len(line) for line in render_table(rows).splitlines()}) == 1


def test_the_subject_is_told_what_it_needs(tmp_path: Path) -> None:
    steps = json.loads(one_two_one())["baton"]["plan"]["steps"]
    assert [step["access"] for step in steps] == [["user"], ["user", 0], ["user", 0], ["user", 1, 2]]
    pool = parse(pool_text("http://127.0.0.1:9"), "pool.toml", {"BENCH_KEY": "sk-bench"})
    assert {worker.name for worker in pool.catalog.workers.values()} == set(WORKERS)
    env = environment(tmp_path, 1, tmp_path / "pool.toml", None, None)
    assert env["BATON_BOOTSTRAP_KEY"] == KEY
    assert "BATON_REDIS_URL" not in env


def test_a_paced_load_keeps_its_rate_whatever_the_answers_take(workers: RunningProcess) -> None:
    """Forty connections at 100 a second: half a second of load is fifty requests, though each takes 100 ms."""
    load = Load(
        url=f"{workers.url}/d100/v1/chat/completions", body=one_step("fast"), connections=40, seconds=0.5, rate=100.0
    )
    report = asyncio.run(generator.generate(load))
    assert report.errors == 0
    assert 40 <= report.requests <= 100


def test_commits_of_sqlite_are_counted_from_outside(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'one.db'}"
    database = sqlite3.connect(tmp_path / "one.db", isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE t (x)")
    before = commits.read(url)
    for _ in range(3):
        database.execute("INSERT INTO t VALUES (zeroblob(20000))")  # several pages, one commit
        database.execute("SELECT count(*) FROM t").fetchall()
    assert commits.read(url).since(before) == 3
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(commits.WalRestartError):
        commits.read(url).since(before)
    database.close()


def test_commits_of_postgres_are_counted_from_outside(postgres_data: Path) -> None:
    async def write(url: str) -> None:
        connection = await commits.asyncpg.connect(url)
        await connection.execute("CREATE TABLE t (x int)")
        for _ in range(3):
            await connection.fetch("SELECT 1")
            await connection.execute("INSERT INTO t VALUES (1), (2)")
        await connection.close()

    with servers.postgres(copied=postgres_data) as server:
        before = commits.read(server.url)
        assert commits.read(server.url).since(before) == 0
        asyncio.run(write(server.url))
        assert commits.read(server.url).since(before) == 4


def test_another_tree_runs_its_own_code(tmp_path: Path) -> None:
    """The installed `app` is this tree's; a process of another one must not import it."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("print('another')")
    tree = Tree(tmp_path)
    assert run_to_end(tree.command("app"), env=tree.environ, folder=tree.root) == "another\n"
    with pytest.raises(DidNotStart, match="absent"):
        run_to_end(tree.command("app.absent"), env=tree.environ, folder=tree.root)


def trees() -> list[Subject]:
    return [Subject(Tree(), Target(name, "", ())) for name in ("this", "other")]


def test_rounds_of_two_trees_alternate_and_their_ratios_are_of_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    order_of_rounds: list[str] = []
    figures = iter([9.0, 9.0, 2.0, 1.0, 30.0, 10.0, 4.0, 2.0])

    def measure(subject: Subject, effort: Effort) -> float:
        order_of_rounds.append(subject.target.name)
        return next(figures)

    rows = measure_subjects(Figure("f", 5, "ms", measure), trees(), Effort(rounds=3))
    assert order_of_rounds == ["this", "other"] * 4, "one round of each to warm up, then three"
    assert [row.rounds for row in rows] == [(2.0, 30.0, 4.0), (1.0, 10.0, 2.0)]
    assert [row.measured for row in rows] == [4.0, 2.0]
    assert [row.verdict for row in rows] == ["met", "met"]
    assert Comparison(*rows).ratio == 2.0
    assert "... f" in capsys.readouterr().out


def test_a_figure_that_cannot_be_measured_has_a_reason_instead() -> None:
    def measure(subject: Subject, effort: Effort) -> float:
        raise ScenarioError(f"{subject.target.name} answers 500")

    rows = measure_subjects(Figure("f", 5, "ms", measure), trees(), Effort(rounds=3))
    assert [(row.measured, row.note, row.verdict) for row in rows] == [(None, "this answers 500", "-")] * 2
    assert Comparison(*rows).verdict == "-"


@pytest.mark.parametrize(
    ("this", "other", "better", "verdict"),
    [
        (1.2, 1.0, "lower", "WORSE"),
        (1.05, 1.0, "lower", "same"),
        (0.8, 1.0, "lower", "better"),
        (0.8, 1.0, "higher", "WORSE"),
        (1.2, 1.0, "higher", "better"),
        (1.2, 0.0, "lower", "-"),
    ],
)
def test_a_comparison_has_a_verdict(this: float, other: float, better: str, verdict: str) -> None:
    sides = [Row("f", None, "ms", side, better=better, rounds=(side,)) for side in (this, other)]  # type: ignore[arg-type]
    assert Comparison(*sides).verdict == verdict
    assert verdict in compare_rows([Comparison(*sides)])


def test_a_simulated_fleet_counts_what_it_asks_of_its_database() -> None:
    idle, loaded = demand(2, 0), demand(2, 10)
    assert idle.reads > 0
    assert (idle.writes, idle.runs) == (0, 0)
    assert loaded.reads > idle.reads
    assert 2 * loaded.runs <= loaded.writes <= 6 * 10
    assert loaded.runs >= 8


def test_a_larger_fleet_is_priced_by_what_it_asks_for_more() -> None:
    cost = scaleout.Cost(database_ms=1.0, gateway_ms=1.0, engine_ms=2.0, log_bytes=10_000)
    fleets = {
        2: (Demand(reads=160, writes=0, runs=0), Demand(reads=160, writes=300, runs=100)),
        100: (Demand(reads=8000, writes=0, runs=0), Demand(reads=16_000, writes=600, runs=100)),
    }
    small, large = scaleout.rows(fleets, cost, idle_ms=1.0, runs_per_engine=5.0)
    assert small.cores == pytest.approx((10 * 1.0 + 2 * 1.0) / 1000)
    assert large.cores == pytest.approx((500 * 2.0 + 100 * 2.0) / 1000)  # twice the transactions, twice the polling
    assert large.log_mb_per_second == pytest.approx(5.0)
