"""The command line as its users meet it, over a data folder of the test's own and without network.

Services are processes, and so is one command of each kind; the others are run inside the test, by the same `main`.
"""

import asyncio
import gc
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from sqlalchemy.engine import make_url

from app.__main__ import main
from app.cli.operations import startup_message
from app.errors import ConfigInvalid
from app.process.serve import Announcement
from tests.audit.test_command import reader_left
from tests.harness import processes
from tests.harness.processes import KEY, ROOT
from tests.harness.waiting import PATIENCE_SECONDS, until, wait_until

EASY = "What is 17 * 23?"
HARD = "Solve 3(x + 2) = 2x + 11"


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of a command, without this machine's providers and settings."""
    own = {"BATON_BOOTSTRAP_KEY": KEY, "BATON_REHEARSAL_DELAY": "0"}
    return processes.environment(folder, **(own | more))


@dataclass
class Done:
    """The outcome of a command."""

    status: int
    out: str
    err: str


def apart(folder: Path, *arguments: str, **more: str) -> Done:
    """One command to its end, in a process of its own."""
    process = processes.run_command(folder, environment(folder, **more), *arguments)
    return Done(process.returncode, process.stdout, process.stderr)


def baton(folder: Path, *arguments: str, **more: str) -> Done:
    """One command to its end, in this process: most of another one's time would be spent on being there."""
    with chdir(folder), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main(arguments, environment(folder, **more))
    return Done(status, out.getvalue(), err.getvalue())


@dataclass
class Service:
    """A `baton serve` that runs."""

    folder: Path
    url: str
    startup_message: str

    def ask(self, model: str, question: str, **more: Any) -> dict[str, Any]:
        """One question by HTTP."""
        body = {"model": model, "messages": [{"role": "user", "content": question}], **more}
        reply = httpx.post(
            f"{self.url}/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=PATIENCE_SECONDS,
        )
        reply.raise_for_status()
        reply_body: dict[str, Any] = reply.json()
        return reply_body


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("baton")) as running:
        yield running


@contextmanager
def serving(folder: Path, **more: str) -> Iterator[Service]:
    """A `baton serve` over a folder of its own; it must end with 0, and quietly."""
    with processes.running_process("serve", folder, environment(folder, **more)) as process:
        yield Service(folder, process.url, process.output)
        assert process.stop() == 0
        assert "Traceback" not in process.log


# -- the parser


@pytest.mark.long
def test_the_version_is_printed_without_loading_the_service() -> None:
    words = "import sys; from app.__main__ import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
    check = "print(sorted(set(sys.modules) & {'sqlalchemy', 'fastapi', 'pydantic', 'aiohttp', 'rich', 'asyncio'}))"
    result = subprocess.run(
        [sys.executable, "-c", words + check], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.splitlines() == [f"baton {version('baton')}", "[]"]


@pytest.mark.long
def test_a_process_loads_neither_redis_nor_migrations_nor_exporters_before_it_knows_that_it_needs_them() -> None:
    """Each is a twelfth of what an idle process holds. Commands about keys and runs load no web framework either."""
    commands = "import sys, app.cli.administration.keys, app.cli.runs.one_run, app.cli.operations.top\n"
    words = commands + "assert 'fastapi' not in sys.modules\nimport app.cli.operations.serve\n"
    check = "print(sorted(set(sys.modules) & {'redis', 'alembic', 'opentelemetry.sdk', 'opentelemetry.exporter'}))"
    result = subprocess.run(
        [sys.executable, "-c", words + check], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout == "[]\n"


WRONG_TRAININGS = (
    "--full-usd 0", "--full-seconds 0", "--full-usd nan", "--beta 0", "--held-out-questions -1", "--lora -1",
    "--held-out 5", "--held-out -1", "--rate 0", "--imitation-rate inf", "--gap nan",
)  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        *("", "nothing", "keys", "keys add", "runs ls --limit 0", "keys add x --expires 3y"),
        *(f"train {option}" for option in WRONG_TRAININGS),
    ],
)
def test_a_wrong_command_line_exits_with_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(line.split(), {})
    assert end.value.code == 2
    assert "Usage: baton" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model x", "--model: has no effect with --backend builtin"),
        ("--tasks t.jsonl", "--tasks: has no effect with --backend builtin"),
        ("--from f", "--from: has no effect with --backend builtin"),
        ("--rounds 2 --from f --recipe words", "--recipe: has no effect with --rounds 2"),
        ("--rounds 2 --from f --dear", "--dear: has no effect with --rounds 2"),
        (
            "--backend awr --model m --warm-start journal --everybody --cache c",
            "--cache: has no effect with --backend awr",
        ),
        ("--backend trl --model m --gap 0.5", "--gap: has no effect with --backend trl"),
        ("--warm-start r.jsonl --consent study", "--consent: chooses runs of the journal"),
    ],
)
def test_an_option_that_a_training_does_not_use_is_refused(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *line.split()], {}) == 2
    assert message in capsys.readouterr().err


def test_filters_beside_a_run_that_is_named_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--signs", "--run", "last", "--tenant", "a", "--since", "7d"]
    assert main(["grade", *options], {"BATON_DATA_DIR": str(tmp_path)}) == 2
    assert "--run names one run; remove --since, --tenant" in capsys.readouterr().err


# -- faults


def test_all_faults_of_a_configuration_are_told_one_a_line(tmp_path: Path) -> None:
    result = apart(tmp_path, "serve", BATON_PROT="1", BATON_PORT="x", BATON_LOG_LEVEL="loud")
    assert result.status == 2
    assert [line.split(":")[0] for line in result.err.splitlines()] == ["BATON_PROT", "BATON_PORT", "BATON_LOG_LEVEL"]


@pytest.mark.parametrize("verb", ["gateway", "dispatcher"])
def test_separate_processes_need_postgres_and_redis(tmp_path: Path, verb: str) -> None:
    result = baton(tmp_path, verb)
    assert result.status == 2
    assert "BATON_REDIS_URL" in result.err
    assert "BATON_DATABASE_URL" in result.err


@pytest.mark.parametrize("line", ["migrate", "runs ls", "keys ls", "plan x", "restored", "migrate --status"])
def test_a_database_that_is_down_is_named_with_the_cause_and_without_its_password(tmp_path: Path, line: str) -> None:
    result = baton(tmp_path, *line.split(), BATON_DATABASE_URL="postgresql://baton:secret@127.0.0.1:1/x")
    url = "postgresql://baton:********@127.0.0.1:1/x"
    words = f"database: {url}\nbaton: The database {url} cannot be used: nothing listens on 127.0.0.1:1.\n"
    assert (result.status, result.out, result.err) == (1, "", words)


@pytest.mark.parametrize(
    "line",
    [
        "runs ls",
        "runs show",
        "runs watch",
        "runs cancel x",
        "keys add x",
        "keys ls",
        "keys revoke x",
        "plan x",
        "audit check",
        "audit export x",
        "rollouts x --everybody",
        "grade --signs",
        "calibrate --yes",
        "offpolicy",
        "conductor ls",
        "doctor",
        "config",
        "migrate --status",
        "migrate --sql",
    ],
)
def test_no_command_but_serve_and_migrate_makes_a_database(tmp_path: Path, line: str) -> None:
    result = baton(tmp_path, *line.split())
    assert not list(tmp_path.rglob("*.db*"))
    if not line.startswith(("doctor", "config", "migrate")):
        assert result.status == (2 if line.startswith("audit") else 1)
        assert "database: sqlite:///" in result.err
        assert "yet; `baton serve` or `baton migrate` makes it" in result.err


@pytest.mark.parametrize("line", ["doctor", "doctor --json", "migrate --status", "migrate --status --json", "probe"])
def test_the_exit_status_tells_of_a_failure_though_nobody_reads_the_output(tmp_path: Path, line: str) -> None:
    with reader_left():
        assert main(line.split(), environment(tmp_path, BATON_LOG_EXPORT="/dev/null/log", BATON_PORT="1")) == 1


@pytest.mark.long
def test_a_command_goes_on_though_nobody_reads_its_output(tmp_path: Path) -> None:
    """Both streams may lead into the pipe whose reader leaves, as after `2>&1 | head -1`."""
    own = environment(tmp_path)
    assert main(["migrate"], own) == 0
    with reader_left(), redirect_stderr(sys.stdout):
        assert main(["offpolicy"], own) == 1
        assert main(["holds", "release", "hold_0199"], own) == 1
        assert main(["keys", "add", "unread"], own) == 0
    assert "unread" in baton(tmp_path, "keys", "ls").out


@pytest.mark.long
def test_what_the_terminals_encoding_lacks_is_printed_as_an_escape(service: Service) -> None:
    service.ask("baton-mini", "Überprüfe: 3 — 日本?")
    shown = apart(service.folder, "runs", "show", "last", "--full", PYTHONIOENCODING="ascii")
    assert (shown.status, "3 \\u2014 \\u65e5\\u672c?" in shown.out) == (0, True), shown.err


@pytest.mark.long
def test_a_run_whose_events_somebody_has_deleted_is_said_to_be_damaged(service: Service, tmp_path: Path) -> None:
    run = service.ask("baton-mini", EASY)["baton"]["run"]
    (tmp_path / "data").mkdir()
    with (
        closing(sqlite3.connect(service.folder / "data" / "baton.db")) as original,
        closing(sqlite3.connect(tmp_path / "data" / "baton.db")) as copy,
    ):
        original.backup(copy)
    for event, condition in ((7, "seq = 7"), (1, "seq = 1"), (1, "seq > 1")):
        with closing(sqlite3.connect(tmp_path / "data" / "baton.db")) as database, database:
            database.execute(f"DELETE FROM events WHERE run = ? AND {condition}", (run,))
        for command in ("show", "explain"):
            shown = baton(tmp_path, "runs", command, run)
            assert (shown.status, f"The event {event} of the run {run} cannot be read" in shown.err) == (1, True)


@pytest.mark.long
def test_a_list_that_is_followed_ends_when_nobody_reads_it(service: Service) -> None:
    service.ask("baton-mini", EASY)
    with reader_left():
        assert main(["runs", "ls", "--follow"], environment(service.folder)) == 0


def test_a_probe_of_what_is_no_address_fails_in_words(tmp_path: Path) -> None:
    result = baton(tmp_path, "probe", "--host", "a\nb", BATON_PORT="1")
    assert (result.status, "nothing answers on port 1" in result.out) == (1, True)


def test_what_is_no_database_is_said(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "baton.db").write_bytes(b"no database " * 100)
    assert "file is not a database" in baton(tmp_path, "runs", "ls").err


@pytest.mark.long
def test_migrations_are_shown_printed_and_stopped_at_a_revision(tmp_path: Path) -> None:
    names = sorted(path.name[:4] for path in (ROOT / "migrations" / "versions").glob("0*.py"))
    state = json.loads(baton(tmp_path, "migrate", "--status", "--json").out)
    assert (state["current"], state["head"], [entry["id"] for entry in state["pending"]]) == (None, names[-1], names)
    assert "CREATE TABLE runs" in baton(tmp_path, "migrate", "--sql").out
    assert baton(tmp_path, "migrate", "--to", names[-2]).status == 0
    status = baton(tmp_path, "migrate", "--status")
    assert status.status == 1
    assert f"current  {names[-2]}" in status.out
    assert f"pending  {names[-1]}  " in status.out
    assert f"version_num='{names[-1]}'" in baton(tmp_path, "migrate", "--sql").out
    assert baton(tmp_path, "migrate").status == 0
    assert baton(tmp_path, "migrate", "--status").status == 0
    back = baton(tmp_path, "migrate", "--to", names[-2])
    assert back.status == 2
    assert "add --down" in back.err
    assert baton(tmp_path, "migrate", "--to", names[-2], "--down").status == 0
    assert "there is no revision 9999" in baton(tmp_path, "migrate", "--to", "9999").err


@pytest.mark.long
def test_a_database_of_a_newer_release_is_said(tmp_path: Path) -> None:
    assert baton(tmp_path, "migrate").status == 0
    with closing(sqlite3.connect(tmp_path / "data" / "baton.db")) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.commit()
    for line in ("migrate", "runs ls", "serve"):
        result = baton(tmp_path, line.split()[0], *line.split()[1:], BATON_PORT="0")
        assert result.status == 1
        assert "newer than this program" in result.err
    status = baton(tmp_path, "migrate", "--status")
    assert (status.status, "newer than this program" in status.out) == (1, True)


@pytest.mark.integration
@pytest.mark.long
def test_each_cause_of_a_postgres_that_cannot_be_used_is_named(tmp_path: Path, postgres_url: str) -> None:
    url = make_url(postgres_url)
    absent = url.set(database="nowhere").render_as_string(hide_password=False)
    nobody = url.set(username="nobody_here", password="secret").render_as_string(hide_password=False)
    for refused_url, words in (
        (absent, "the server has no database nowhere"),
        (nobody, "nobody_here"),
        (postgres_url, "no tables"),
    ):
        for line in ("runs ls", "migrate") if refused_url != postgres_url else ("runs ls", "doctor"):
            result = baton(tmp_path, *line.split(), BATON_DATABASE_URL=refused_url)
            assert result.status == 1
            assert words in result.err + result.out
            assert "cannot be reached" not in result.out  # a second verdict on the same database, and a wrong one
            assert "secret" not in result.err


@pytest.mark.integration
@pytest.mark.long
def test_a_key_that_other_processes_may_refuse_is_shown_with_a_note(tmp_path: Path, postgres_url: str) -> None:
    assert baton(tmp_path, "migrate", BATON_DATABASE_URL=postgres_url).status == 0
    added = baton(tmp_path, "keys", "add", "app", BATON_DATABASE_URL=postgres_url)
    assert added.out.startswith("bt_")
    assert "note: BATON_PEPPER is not set" in added.err
    rotated = baton(tmp_path, "keys", "rotate", "app", BATON_DATABASE_URL=postgres_url, BATON_PEPPER="p" * 32)
    assert "note:" not in rotated.err


def test_a_port_that_is_taken_is_said(service: Service, tmp_path: Path) -> None:
    port = service.url.rpartition(":")[2]
    result = apart(tmp_path, "serve", "--port", port)
    assert result.status == 1
    assert f"baton: 127.0.0.1:{port} is in use by another program; choose another port with --port" in result.err
    assert "Traceback" not in result.err
    result = apart(tmp_path, "serve", "--port", "0", BATON_METRICS_PORT=port)
    assert result.status == 1
    assert "is in use by another program; choose another port with BATON_METRICS_PORT" in result.err


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        ({"BATON_ADMIN_PORT": "8811", "BATON_METRICS_PORT": "8811"}, "BATON_ADMIN_PORT: is the port of another"),
        ({"BATON_PORT": "8811", "BATON_METRICS_PORT": "8811"}, "change it, or --port or BATON_PORT"),
        ({"BATON_PORT": "8811", "BATON_ADMIN_PORT": "8811", "BATON_HOST": "0.0.0.0"}, "BATON_ADMIN_PORT: is the port"),
    ],
)
def test_two_listeners_with_one_port_are_refused(tmp_path: Path, ports: dict[str, str], words: str) -> None:
    result = apart(tmp_path, "serve", **ports)
    assert result.status == 2
    assert words in result.err
    assert "Traceback" not in result.err


# -- serve


def test_the_announcement_can_be_pasted(service: Service) -> None:
    assert all(text in service.startup_message for text in ("REHEARSAL", "/console/playground"))
    assert KEY not in service.startup_message
    curl = service.startup_message[
        service.startup_message.index("  curl") : service.startup_message.index("Or in Python")
    ]
    result = subprocess.run(
        ["bash", "-c", curl],
        env={**os.environ, "BATON_API_KEY": KEY, "no_proxy": "*"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    assert "15" in json.loads(result.stdout)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("key", [None, KEY])
def test_the_python_lines_of_the_announcement_compile(key: str | None) -> None:
    words = startup_message.announcement_text(
        "serve", Announcement("http://127.0.0.1:1", "rehearsal", True, key), "baton"
    )
    lines = words[words.index("(pip install openai)") :].splitlines()[1:]
    compile("\n".join(line.removeprefix("  ") for line in lines if line.startswith("  ")), "greeting", "exec")
    assert ("export BATON_API_KEY" in words) == (key is not None)


def test_a_dispatcher_announces_no_address() -> None:
    words = startup_message.announcement_text("dispatcher", Announcement(None, "pool file x", False, None), "baton")
    assert "curl" not in words
    assert "REHEARSAL" not in words


def test_the_probe_tells_ready_from_absent(service: Service, tmp_path: Path) -> None:
    assert apart(tmp_path, "probe", BATON_PORT=service.url.rpartition(":")[2]).status == 0
    assert baton(tmp_path, "probe", BATON_PORT="1").status == 1


def test_ctrl_c_ends_a_service_quietly(tmp_path: Path) -> None:
    with processes.running_process("serve", tmp_path, environment(tmp_path)) as process:
        process.interrupt()
        assert process.wait_for_exit() == 0
        assert "Traceback" not in process.log


# -- runs


def test_show_explains_an_orchestrated_run(service: Service) -> None:
    reply = service.ask("baton-ultra", HARD)
    result = apart(service.folder, "runs", "show", reply["id"])
    assert result.status == 0, result.err
    for words in (
        reply["baton"]["run"],
        "succeeded",
        "REHEARSAL",
        HARD,
        "a model planned it (rehearsal-conductor)",
        "planning call",
        "sees: the conversation and step 0",
        "with probability",
        "attempt 1: rehearsal-",
        "its output is the answer",
        "said: The answer is x = 5.",
        "pool: rehearsal-sage",
        "limits: 5 steps",
    ):
        assert words in result.out
    assert f"${reply['baton']['cost_usd']:.6f}".rstrip("0") in result.out


def test_show_finds_the_last_run_and_prefixes(service: Service) -> None:
    run = service.ask("baton-mini", EASY)["baton"]["run"]
    last = baton(service.folder, "runs", "show", "--json")
    assert json.loads(last.out)["id"] == run
    assert json.loads(baton(service.folder, "runs", "show", run[:-2], "--json").out)["id"] == run
    assert baton(service.folder, "runs", "show", "run_zzzz").status == 1


def test_a_run_is_found_by_the_id_of_its_request(service: Service) -> None:
    run = service.ask("baton-mini", EASY)["baton"]["run"]
    (turn,) = json.loads(baton(service.folder, "runs", "show", run, "--json").out)["turns"]
    text = baton(service.folder, "runs", "show", turn["reply_id"]).out
    assert run in text
    assert f"x-request-id: {turn['request_id']}" in text
    assert f"replies: {turn['reply_id']}" in text
    listed = baton(service.folder, "runs", "ls", "--json", "--request-id", turn["request_id"])
    assert [entry["id"] for entry in json.loads(listed.out)] == [run]
    assert json.loads(baton(service.folder, "runs", "ls", "--json", "--request-id", "other").out) == []


def test_runs_are_listed_by_their_ratings_and_by_what_waits(service: Service) -> None:
    good, bad = [service.ask("baton-mini", EASY)["baton"]["run"] for _ in range(2)]
    headers = {"Authorization": f"Bearer {KEY}"}
    for run, score in ((good, 1.0), (bad, 0.0)):
        url = f"{service.url}/v1/runs/{run}/feedback"
        httpx.post(url, json={"score": score}, headers=headers, timeout=PATIENCE_SECONDS).raise_for_status()

    def list_runs(*options: str) -> set[str]:
        return {entry["id"] for entry in json.loads(baton(service.folder, "runs", "ls", "--json", *options).out)}

    assert {good, bad} & list_runs("--rated", "good") == {good}
    assert {good, bad} & list_runs("--rated", "bad") == {bad}
    assert list_runs("--queue", "untaken") == set()


def test_a_run_is_found_by_the_id_of_its_trace(service: Service) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    body = {"model": "baton-mini", "messages": [{"role": "user", "content": EASY}]}
    headers = {"authorization": f"Bearer {KEY}", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    reply = httpx.post(f"{service.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_SECONDS)
    run = reply.json()["baton"]["run"]
    assert f"trace: {trace}" in baton(service.folder, "runs", "show", run).out
    listed = baton(service.folder, "runs", "ls", "--json", "--trace-id", trace)
    assert [entry["id"] for entry in json.loads(listed.out)] == [run]


def test_a_caller_plan_and_an_exclusion_are_explained(service: Service) -> None:
    plan = {"steps": [{"worker": "rehearsal-scribe", "subtask": "Answer.", "access": ["user"]}]}
    service.ask("baton-ultra", EASY, baton={"plan": plan, "pool": {"deny": ["rehearsal-lawyer"]}})
    text = baton(service.folder, "runs", "show").out
    assert "the request brought its own plan" in text
    assert "left out: rehearsal-lawyer: in the request's deny list" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("report --before 30d", "--since must be longer ago than --before"),
        ("disclosures --since 1h --until 2h", "--since must be earlier than --until"),
    ],
)
def test_a_period_that_ends_before_it_begins_is_refused(line: str, message: str, service: Service) -> None:
    result = baton(service.folder, *line.split())
    assert (result.status, message in result.err) == (2, True), result.err


@pytest.mark.long
def test_ls_filters(service: Service) -> None:
    service.ask("baton-mini", EASY, safety_identifier="eve-hash", metadata={"team": "search"})
    rows = json.loads(baton(service.folder, "runs", "ls", "--tier", "baton-mini", "--json", "--since", "1h").out)
    assert {row["tier"] for row in rows} == {"baton-mini"}
    assert "succeeded" in baton(service.folder, "runs", "ls", "--worker", "rehearsal-sage").out
    assert {row["key_name"] for row in rows} == {"first"}
    assert json.loads(baton(service.folder, "runs", "ls", "--key", "first", "--json").out)
    assert "; key first (bootstrap1), tenant" in baton(service.folder, "runs", "show").out
    assert "no such runs" in baton(service.folder, "runs", "ls", "--label", "nobody").out
    assert "--metadata" in baton(service.folder, "runs", "ls", "--metadata", "team").err
    arguments = ("--user", "eve-hash", "--metadata", "team=search", "--sort", "cost", "--reverse", "--json")
    (row,) = json.loads(baton(service.folder, "runs", "ls", *arguments).out)
    assert row["id"] == rows[0]["id"]
    assert "of 1 run would be erased" in baton(service.folder, "runs", "erase", "--user", "eve-hash", "--dry-run").out


def test_watch_tells_the_journal_to_its_end(service: Service) -> None:
    service.ask("baton-ultra", HARD)
    result = baton(service.folder, "runs", "watch")
    assert result.status == 0
    kinds = re.findall(r" s\s+([a-z]+\.[a-z_]+)", result.out)
    assert kinds[0] == "run.admitted"
    assert kinds[-1] == "run.succeeded"
    lines = baton(service.folder, "runs", "watch", "--json").out.splitlines()
    assert [json.loads(line)["kind"] for line in lines] == kinds


def test_cancel_stops_a_run_of_another_process(tmp_path: Path) -> None:
    with serving(tmp_path, BATON_REHEARSAL_DELAY="100") as slow, ThreadPoolExecutor() as threads:
        asking = threads.submit(slow.ask, "baton-ultra", HARD)
        rows = wait_until(lambda: json.loads(baton(tmp_path, "runs", "ls", "--json").out))
        result = baton(tmp_path, "runs", "cancel", rows[0]["id"])
        assert (result.status, result.out) == (0, f"{rows[0]['id']} has ended: cancelled.\n"), result.err
        with pytest.raises(httpx.HTTPStatusError) as failure:
            asking.result()
        assert failure.value.response.json()["error"]["code"] == "run_cancelled"
        again = baton(tmp_path, "runs", "cancel", rows[0]["id"][:20])
        assert (again.status, again.out) == (result.status, result.out)
    assert baton(tmp_path, "runs", "cancel", "run_none").status == 1


@pytest.mark.usefixtures("database_of_commands")
def test_without_runs_there_is_a_sentence(tmp_path: Path) -> None:
    result = baton(tmp_path, "runs", "show")
    assert result.status == 1
    assert "no runs yet" in result.err


# -- keys


@pytest.mark.long
def test_a_key_lives_from_add_to_revoke(service: Service) -> None:
    added = apart(service.folder, "keys", "add", "ci", "--tier", "baton-mini", "--usd", "0.25", "--expires", "2d")
    key = added.out.strip()
    headers = {"Authorization": f"Bearer {key}"}
    models = httpx.get(f"{service.url}/v1/models", headers=headers, timeout=PATIENCE_SECONDS).json()["data"]
    assert {model["baton"]["tier"] for model in models} == {"baton-mini"}
    listed = baton(service.folder, "keys", "ls").out
    assert key.split("_")[1] in listed
    assert key.split("_", 2)[2] not in listed
    assert "$0.25 a run" in listed
    assert baton(service.folder, "keys", "revoke", key).status == 0
    assert "revoked" in baton(service.folder, "keys", "ls").out
    wait_until(
        lambda: httpx.get(f"{service.url}/v1/models", headers=headers, timeout=PATIENCE_SECONDS).status_code == 401
    )


def test_an_administrator_reaches_other_tenants_only_by_a_key_made_for_that(service: Service) -> None:
    def runs_seen(*options: str) -> int:
        name = f"root{''.join(options)}"
        key = baton(service.folder, "keys", "add", name, "--tenant", "ops", "--scope", "admin", *options).out.strip()
        listed = httpx.get(
            f"{service.url}/v1/runs", headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_SECONDS
        )
        return len(listed.json()["data"])

    service.ask("baton-mini", EASY)
    assert runs_seen() == 0
    assert runs_seen("--all-tenants") > 0


@pytest.mark.long
def test_a_rotated_key_keeps_its_name_and_limits_and_both_secrets_work_for_a_while(service: Service) -> None:
    def statuses(*keys: str) -> list[int]:
        return [
            httpx.get(
                f"{service.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_SECONDS
            ).status_code
            for key in keys
        ]

    first = baton(service.folder, "keys", "add", "turning", "--rpm", "70").out.strip()
    result = baton(service.folder, "keys", "rotate", "turning", "--overlap", "2h", "--json")
    second = json.loads(result.out)["key"]
    assert first.split("_")[1] == second.split("_")[1]
    assert statuses(first, second) == [200, 200]
    key = json.loads(baton(service.folder, "keys", "show", "turning", "--json").out)
    assert (key["name"], key["rpm"], key["in_force"]) == ("turning", 70, True)
    assert first.split("_", 2)[2] not in result.out
    assert "old secret until" in baton(service.folder, "keys", "show", first.split("_")[1]).out
    third = baton(service.folder, "keys", "rotate", "turning", "--no-overlap").out.strip()
    assert statuses(third) == [200]
    wait_until(lambda: statuses(first, second) == [401, 401])
    assert baton(service.folder, "keys", "revoke", "turning").status == 0
    assert "not in force" in baton(service.folder, "keys", "rotate", "turning").err


@pytest.mark.usefixtures("database_of_commands")
def test_names_of_keys_are_unique_among_those_in_force(tmp_path: Path) -> None:
    key = json.loads(baton(tmp_path, "keys", "add", "ci", "--json").out)
    again = baton(tmp_path, "keys", "add", "ci")
    assert (again.status, again.out) == (1, "")
    assert f"The key {key['id']} of this tenant has the name already" in again.err
    assert baton(tmp_path, "keys", "add", "ci", "--tenant", "other", "--role", "auditor").status == 0
    both = baton(tmp_path, "keys", "show", "ci")
    assert (both.status, "2 keys are called ci" in both.err) == (1, True)
    assert baton(tmp_path, "keys", "revoke", key["id"]).status == 0
    assert baton(tmp_path, "keys", "add", "ci").status == 0
    listed = json.loads(baton(tmp_path, "keys", "ls", "--json").out)
    assert [(entry["name"], entry["in_force"]) for entry in listed].count(("ci", True)) == 2
    assert {entry["tenant"]: entry["role"] for entry in listed} == {"default": "caller", "other": "auditor"}
    assert not {"digest", "previous_digest", "key"} & set(listed[0])


@pytest.mark.long
def test_wrong_keys_are_refused_in_words(tmp_path: Path) -> None:
    assert "unknown scope" in baton(tmp_path, "keys", "add", "x", "--scope", "root").err
    assert "no such tier" in baton(tmp_path, "keys", "add", "x", "--tier", "root").err
    assert baton(tmp_path, "migrate").status == 0
    assert "no key with this id" in baton(tmp_path, "keys", "revoke", "abcd").err


# -- plan, doctor, config, migrate


@pytest.mark.long
def test_what_is_printed_can_be_read_by_programs(service: Service) -> None:
    lines = ("config", "doctor", "keys ls", "runs ls", "audit check", "audit rules", "conductor ls", "migrate --status")
    for line in lines:
        result = baton(service.folder, *line.split(), "--json")
        assert result.status == 0, result.err
        assert json.loads(result.out) is not None
    planned = json.loads(baton(service.folder, "plan", HARD, "--json").out)
    assert (planned["preview"], len(planned["steps"])) == (True, 3)


@pytest.mark.long
def test_plan_executes_nothing(service: Service) -> None:
    result = apart(service.folder, "plan", HARD)
    assert result.status == 0, result.err
    assert "estimate: $0.0" in result.out
    assert "planned only, nothing executed" in result.out
    record = json.loads(baton(service.folder, "runs", "show", "--json").out)
    assert record["preview"]
    assert [step["attempts"] for step in record["steps"]] == [[], [], []]
    newest = json.loads(baton(service.folder, "runs", "ls", "--limit", "1", "--json").out)
    assert [(entry["preview"], entry["key_name"]) for entry in newest] == [(True, None)]
    baton(service.folder, "plans", "make", HARD)
    assert baton(service.folder, "runs", "ls", "--limit", "2").out.count("succeeded (preview)") == 2
    for which, planned in (("only", True), ("none", False)):
        listed = json.loads(baton(service.folder, "runs", "ls", "--previews", which, "--json").out)
        assert (newest[0]["id"] in {run["id"] for run in listed}) == planned
        assert {run["preview"] for run in listed} <= {planned}


@pytest.mark.parametrize(
    ("more", "words"),
    [(["--tier", "x"], "no such tier"), (["--effort", "x"], "no such level"), (["--label", "phi"], "not cleared")],
)
@pytest.mark.usefixtures("database_of_commands")
def test_plan_says_why_not(tmp_path: Path, more: list[str], words: str) -> None:
    result = baton(tmp_path, "plan", EASY, *more)
    assert result.status in (1, 2)
    assert words in result.err


def test_doctor_is_content_with_rehearsal_and_says_so(tmp_path: Path) -> None:
    result = apart(tmp_path, "doctor")
    assert result.status == 0, result.out
    assert "REHEARSAL" in result.out
    assert "skip  redis" in result.out
    assert "fail" not in result.out


def test_doctor_finds_what_is_broken(tmp_path: Path) -> None:
    result = baton(
        tmp_path,
        "doctor",
        OPENAI_API_KEY="sk-secret",
        OPENAI_BASE_URL="http://127.0.0.1:1/v1",
        BATON_DATABASE_URL="postgresql://baton:secret@127.0.0.1:1/x",
        BATON_REDIS_URL="redis://127.0.0.1:1/0",
    )
    assert result.status == 1
    failed = re.findall(r"^fail\s+([a-z]+)", result.out, re.MULTILINE)
    assert failed == ["schema", "redis", "conductor", "provider"]
    assert result.out.count("->") >= 5
    assert "secret" not in result.out + result.err
    assert "fraction of a cent" in result.err


def test_doctor_tells_faulty_settings(tmp_path: Path) -> None:
    result = baton(tmp_path, "doctor", BATON_PROT="1")
    assert result.status == 1
    assert "fail  settings: BATON_PROT" in result.out


def test_config_lists_everything_and_masks_secrets(tmp_path: Path) -> None:
    result = apart(tmp_path, "config", BATON_REDIS_URL="redis://:hush@127.0.0.1:1/0")
    assert result.status == 0
    for words in ("BATON_PORT", "8080", "environment", "Pool: rehearsal", "baton-ultra: rehearsal-sage"):
        assert words in result.out
    assert KEY not in result.out
    assert "hush" not in result.out


def test_migrate_makes_the_database(tmp_path: Path) -> None:
    assert apart(tmp_path, "migrate").status == 0
    assert baton(tmp_path, "migrate").status == 0
    assert (tmp_path / "data" / "baton.db").exists()


# -- the program


@pytest.mark.parametrize("arguments", [None, ["config"]])
def test_imports_are_kept_from_the_collector_which_then_works(
    arguments: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(sys, "argv", ["baton", "config"])
    monkeypatch.setattr("app.cli.operations.config.run", lambda *_: int(gc.isenabled()))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("frozen"))
    assert main(arguments, {}) == 1
    assert calls == (["frozen"] if arguments is None else [])


@pytest.mark.long
def test_a_command_works_whose_streams_are_closed(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m app migrate --status --json <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, env=environment(tmp_path), timeout=PATIENCE_SECONDS)
    assert done.returncode == 1, "the database is still to be made"


@pytest.mark.long
def test_files_that_cannot_be_used_are_named_without_a_traceback(tmp_path: Path) -> None:
    assert baton(tmp_path, "migrate").status == 0
    for words in ("rollouts {} --everybody", "replay last --under plan={}"):
        result = baton(tmp_path, *words.format(tmp_path / "absent" / "x").split())
        assert (result.status, f"{tmp_path}/absent/x" in result.err) == (2, True)


def test_config_invalid_is_not_hidden_in_a_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", [ConfigInvalid(["a: wrong", "b: wrong"])])])

    monkeypatch.setattr("app.cli.operations.config.run", broken)
    assert main(["config"], {}) == 2
    assert capsys.readouterr().err == "a: wrong\nb: wrong\n"


@pytest.mark.long
def test_erasing_wants_to_be_told_what(service: Service) -> None:
    service.ask("baton-mini", EASY, user="eve")
    assert "say what to erase" in baton(service.folder, "runs", "erase").err
    assert "leave the other options out" in baton(service.folder, "runs", "erase", "--run", "last", "--user", "eve").err
    assert "of 1 run would be erased" in baton(service.folder, "runs", "erase", "--user", "eve", "--dry-run").out
    assert "of 0 runs would be erased" in baton(service.folder, "runs", "erase", "--before", "1d", "--dry-run").out
    counted = json.loads(baton(service.folder, "runs", "erase", "--user", "eve", "--dry-run", "--json").out)
    assert counted == {"runs": 1, "erased": False}
    assert "of 1 run would be erased" in baton(service.folder, "runs", "erase", "--run", "last", "--dry-run").out
    assert "There is no such run" in baton(service.folder, "runs", "erase", "--run", "run_0", "--dry-run").err
    assert "of 1 run is erased" in baton(service.folder, "runs", "erase", "--run", "last").out
    assert "of 0 runs would be erased" in baton(service.folder, "runs", "erase", "--run", "last", "--dry-run").out
    assert "of 0 runs is erased" in baton(service.folder, "runs", "erase", "--user", "eve").out


@pytest.fixture
async def locked_url(postgres_server_url: str) -> AsyncIterator[str]:
    """A URL with a wrong password, of a user whose password the server checks; it trusts everybody else."""
    url = make_url(postgres_server_url).set(username=f"locked_{uuid.uuid4().hex[:8]}", password="wrong")
    admin = await asyncpg.connect(postgres_server_url)
    await admin.execute(f"CREATE ROLE {url.username} LOGIN PASSWORD 'right'")
    rules = Path(await admin.fetchval("SHOW hba_file"))
    before = await asyncio.to_thread(rules.read_text)
    try:
        await asyncio.to_thread(rules.write_text, f"host all {url.username} 127.0.0.1/32 scram-sha-256\n{before}")
        await admin.execute("SELECT pg_reload_conf()")
        locked = url.render_as_string(hide_password=False)
        await until(lambda: is_refused(locked))  # the server reads its rules a moment later
        yield locked
    finally:
        await asyncio.to_thread(rules.write_text, before)
        await admin.execute("SELECT pg_reload_conf()")
        await admin.execute(f"DROP ROLE {url.username}")
        await admin.close()


async def is_refused(url: str) -> bool:
    try:
        await (await asyncpg.connect(url)).close()
    except asyncpg.InvalidPasswordError:
        return True
    return False


@pytest.mark.long
async def test_a_real_server_that_refuses_a_password_is_named(locked_url: str, tmp_path: Path) -> None:
    result = await asyncio.to_thread(baton, tmp_path, "keys", "ls", BATON_DATABASE_URL=locked_url)
    assert result.status == 1
    assert f"the password of the user {make_url(locked_url).username} is wrong" in result.err
    assert "wrong@" not in result.err


def is_sealed(path: Path, run: str) -> bool:
    """Return True if all events of a run are sealed."""
    sealed = "SELECT max(events) FROM log_leaves WHERE kind = 'run' AND subject = runs.id"
    with closing(sqlite3.connect(path)) as database:
        query = f"SELECT count(*) FROM runs WHERE id = ? AND seq = ({sealed})"
        return database.execute(query, (run,)).fetchone() == (1,)


@pytest.mark.long
def test_pruning_deletes_old_runs_alone(service: Service) -> None:
    old, new = (service.ask("baton-mini", EASY)["baton"]["run"] for _ in range(2))
    with closing(sqlite3.connect(service.folder / "data" / "baton.db")) as database, database:
        database.execute("UPDATE runs SET created_at = 1, ended_at = 2, deadline = 3 WHERE id = ?", (old,))
    wait_until(lambda: is_sealed(service.folder / "data" / "baton.db", old))
    counted = baton(service.folder, "runs", "prune", "--before", "30d", "--dry-run").out
    assert "1 run with 9 events would be pruned" in counted
    held = json.loads(baton(service.folder, "holds", "add", "--run", old, "--reason", "case 12", "--json").out)
    for words in (("--dry-run",), ()):
        kept = baton(service.folder, "runs", "prune", "--before", "30d", *words).out
        assert "a legal hold covers them: 1 run" in kept
    erased = baton(service.folder, "runs", "erase", "--before", "30d", "--dry-run")
    assert "of 0 runs would be erased" in erased.out
    assert f"({held[0]['id']}) keep 1 other run whole" in erased.out
    assert baton(service.folder, "holds", "release", held[0]["id"]).status == 0
    text = baton(service.folder, "runs", "prune", "--before", "30d", BATON_ARCHIVE=str(service.folder / "archive")).out
    assert "Pruned: 1 run with 9 events." in text
    assert "1 run, 9 events" in baton(service.folder, "audit", "check", text.splitlines()[-1]).out
    assert "was pruned" in baton(service.folder, "runs", "show", old).err
    changes = json.loads(baton(service.folder, "audit", "changes", "--action", "run.pruned", "--json").out)
    assert [(change["target"], change["via"]) for change in changes] == [(old, "command")]
    assert "0 violations" in baton(service.folder, "audit", "check").out
    assert new in baton(service.folder, "runs", "show", new).out
