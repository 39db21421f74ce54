"""The README keeps its word: its commands are pasted against a service that was started as it says."""

import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from shutil import which
from typing import Any, Final, Literal, get_args, get_origin
from unittest.mock import patch

import pytest

from app.__main__ import main
from app.process.config import configure, entries
from app.process.config.settings import variables
from tests.harness.waiting import PATIENCE_SECONDS

ROOT: Final = Path(__file__).resolve().parents[2]
README: Final = (ROOT / "README.md").read_text()
PLANS: Final = (ROOT / "deploy" / "docs" / "plans.md").read_text()
CALLERS: Final = (ROOT / "deploy" / "docs" / "callers.md").read_text()
START: Final = (ROOT / "deploy" / "docs" / "start.md").read_text()
SETTINGS: Final = (ROOT / "deploy" / "docs" / "settings.md").read_text()
LITELLM: Final = (ROOT / "deploy" / "docs" / "litellm.md").read_text()
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "deploy" / "docs").glob("*.md")))
ADDRESS: Final = "http://127.0.0.1:8080"


def blocks(language: str, page: str = README) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@dataclass
class Terminal:
    """A second terminal beside the service, with the printed key exported."""

    url: str
    environ: dict[str, str]
    folder: Path

    def paste(self, *command: str, text: str) -> str:
        """Run the text in a shell and return its output; it must exit with 0."""
        process = subprocess.run(
            [*command, text.replace(ADDRESS, self.url)],
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    def execute(self, program: str) -> str:
        """Run a program of the official client in this process, which has loaded that, and return its output."""
        names: dict[str, Any] = {"__name__": "__main__"}
        with patch.dict(os.environ, self.environ, clear=True), redirect_stdout(StringIO()) as out:
            exec(compile(program.replace(ADDRESS, self.url), "README", "exec"), names)
            names["client"].close()
        return out.getvalue()

    def type(self, *words: str) -> str:
        """Run a command of ours by its `main` in this process and return its output; it must exit with 0."""
        with chdir(self.folder), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            status = main(words, self.environ)
        assert status == 0, err.getvalue()
        return out.getvalue()


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    folder = tmp_path_factory.mktemp("readme")
    bin_folder = Path(sys.executable).parent
    environ = {
        "PATH": f"{bin_folder}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "BATON_PORT": "0",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "app", "serve"], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        words = ""
        for line in process.stdout:
            words += line
            if "runs show last" in line:
                break
        key = re.search(r"export BATON_API_KEY=(bt_\S+)", words)
        url = re.search(r"listening on (\S+)", words)
        assert key, words
        assert url, words
        yield Terminal(url[1], {**environ, "BATON_API_KEY": key[1]}, folder)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0


@pytest.fixture(scope="module")
def read_printed(terminal: Terminal) -> str:
    """Return the text that the first example in Python prints."""
    (program,) = blocks("python")
    return terminal.execute(program)


@pytest.fixture
def run(terminal: Terminal, read_printed: str) -> str:
    """The id of the last run, of which there is one even if no other test has run before."""
    assert read_printed
    listed = json.loads(terminal.type("runs", "ls", "--json"))
    run_id: str = listed[0]["id"]
    return run_id


def test_it_is_short_and_in_order() -> None:
    assert len(README.splitlines()) <= 200
    headings = re.findall(r"^## (.+)$", README, re.MULTILINE)
    expected_headings = ("minute", "request", "ocabulary", "Map", "Workers", "Production", "Settings", "Tests")
    assert [word in heading for word, heading in zip(expected_headings, headings, strict=True)] == [True] * len(
        expected_headings
    )


def test_make_run_starts_the_service() -> None:
    assert "make run\n" in blocks("sh")
    recipe = re.search(r"^run:.*\n\t(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    assert recipe[1].endswith("baton serve")


def test_the_curl_request_gets_the_right_answer(terminal: Terminal) -> None:
    (curl,) = [block for block in blocks("sh") if block.startswith("curl")]
    reply = json.loads(terminal.paste("bash", "-ec", text=curl))
    assert "15" in reply["choices"][0]["message"]["content"]
    assert reply["baton"]["rehearsal"] is True


@pytest.mark.long
def test_the_python_example_gets_the_right_answer_twice(read_printed: str) -> None:
    assert read_printed.splitlines() == ["The answer is 132."] * 2


def test_the_tool_loop_comes_to_its_answer(terminal: Terminal) -> None:
    (program,) = [block for block in blocks("python", CALLERS) if "tools" in block]
    assert terminal.execute(program).splitlines() == ["The answer is 7006652."]


def text_of_lines(lines: list[str]) -> str:
    """The text in the lines of a stream of chunks."""
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_a_broken_connection_loses_nothing(terminal: Terminal) -> None:
    ask, *_ = blocks("sh", CALLERS)
    lines = terminal.paste("bash", "-ec", text=ask).splitlines()
    end = lines.index("data: [DONE]")
    first, again, rest = lines[:5], lines[5:end], lines[end + 1 :]
    assert first[0] == again[0] == "id: 0"
    assert "391" in text_of_lines(again)
    assert text_of_lines(again).startswith(text_of_lines(first))
    assert text_of_lines(again)[:4] + text_of_lines(rest) == text_of_lines(again)
    assert "data: [DONE]" in rest


def test_the_client_may_ask_as_often_as_it_likes(terminal: Terminal) -> None:
    (program,) = [block for block in blocks("python", CALLERS) if "Idempotency-Key" in block]
    first_line, second_line = terminal.execute(program).splitlines()
    assert first_line == second_line
    assert "391" in first_line


def test_a_run_is_stopped_by_its_id(terminal: Terminal, run: str) -> None:
    (stop,) = [block for block in blocks("sh", CALLERS) if "/cancel" in block]
    stopped = json.loads(terminal.paste("bash", "-ec", text=f"RUN={run}\n{stop}"))
    assert (stopped["id"], stopped["state"]) == (run, "succeeded")


def test_a_compressed_request_gets_the_right_answer(terminal: Terminal) -> None:
    *_, ask, _, _ = blocks("sh", CALLERS)
    reply = json.loads(terminal.paste("bash", "-ec", text=ask))
    assert "4" in reply["choices"][0]["message"]["content"]


@pytest.mark.usefixtures("run")
def test_a_list_names_the_place_of_its_next_page(terminal: Terminal) -> None:
    *_, page, _ = blocks("sh", CALLERS)
    listed = json.loads(terminal.paste("bash", "-ec", text=page))
    assert listed["last_id"] == listed["data"][-1]["id"]


def test_a_run_is_rated_by_its_id(terminal: Terminal, run: str) -> None:
    *_, rate = blocks("sh", CALLERS)
    rated = json.loads(terminal.paste("bash", "-ec", text=f"RUN={run}\n{rate}"))
    assert (rated["run"], rated["score"], rated["label"]) == (run, 0.0, "wrong_unit")
    output = terminal.type("runs", "show", run)
    assert "explicit, by user: 0 of 1, wrong_unit" in output
    assert "Miles, not kilometres." in output


@pytest.mark.usefixtures("run")
@pytest.mark.long
def test_the_commands_explain_it(terminal: Terminal) -> None:
    (block,) = [block for block in blocks("sh") if "runs show" in block]
    activate, *commands = block.splitlines()
    assert activate == ". .venv/bin/activate"
    output = ""
    for line in commands:
        program, *words = shlex.split(line, comments=True)
        assert program == "baton"
        output += terminal.type(*words)
    for words in ("succeeded", "its output is the answer", "sees: the conversation", "estimate: ", "0 violations"):
        assert words in output


def test_the_pool_snippets_make_a_pool(tmp_path: Path) -> None:
    text = "\n".join(blocks("toml"))
    (tmp_path / "pool.toml").write_text(text)
    configuration = configure(
        {"BATON_POOL": str(tmp_path / "pool.toml"), "OPENAI_API_KEY": "sk-test", "BATON_DATA_DIR": str(tmp_path)}
    )
    assert {"workers", "providers", "tiers"} == set(tomllib.loads(text))
    assert set(configuration.catalog.tiers) == {"quick"}


@pytest.mark.long
def test_every_command_for_this_machine_works(terminal: Terminal, run: str) -> None:
    (block,) = [block for block in blocks("sh", START) if "baton keys ls" in block]
    output = ""
    for line in block.splitlines():
        output += (
            terminal.type(*shlex.split(line)[1:])
            if line.startswith("baton ")
            else terminal.paste("bash", "-ec", text=line)
        )
    for words in ("rehearsal", "laptop", "baton-ultra", run):
        assert words in output


@pytest.mark.skipif(which("sqlite3") is None, reason="sqlite3 is not installed (Debian package: sqlite3)")
@pytest.mark.long
def test_the_commands_of_the_first_day_work(terminal: Terminal) -> None:
    """Each block of the section in its order; the commands of Baton in this process."""
    _, _, section = START.partition("## The first day")
    output = ""
    for block in blocks("sh", section):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            output += terminal.type(*words[1:]) if words[0] == "baton" else terminal.paste("bash", "-ec", text=line)
    for words_of_output in (
        "The answer is 391.",
        "Cost: ",
        "default/user/ann@example.com/day",
        "Nothing that was sealed is altered or missing.",
        "The content of 1 run is erased",
    ):
        assert words_of_output in output
    assert (terminal.folder / "backup" / "pepper").exists()


def test_a_plan_is_made_edited_and_executed(terminal: Terminal) -> None:
    text = "\necho\n".join(["cd $(mktemp -d)", *blocks("sh", PLANS)])
    edited, answered = [json.loads(line) for line in terminal.paste("bash", "-ec", text=text).splitlines() if line]
    assert edited["revision"] == 2
    assert edited["estimate"]["cost_usd"]["p50"] > 0
    assert "5" in answered["choices"][0]["message"]["content"]


def test_what_litellms_configuration_becomes_is_a_valid_pool(tmp_path: Path) -> None:
    (text,) = blocks("toml", LITELLM)
    (tmp_path / "pool.toml").write_text(text)
    environ = {"HOUSE_KEY": "sk-house", "ANTHROPIC_API_KEY": "sk-test", "BATON_DATA_DIR": str(tmp_path)}
    configuration = configure({"BATON_POOL": str(tmp_path / "pool.toml"), **environ})
    assert configuration.catalog.tiers["assistant"].pool == ("luna", "haiku")


def test_the_map_is_the_tree() -> None:
    (section,) = re.findall(r"^## Map of `app/`\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    paths = {name.rstrip("/") for name in re.findall(r"`([\w/.]+)`", section)}
    there = {path.name for path in (ROOT / "app").iterdir() if not path.name.startswith("__")} | {"__main__.py"}
    assert there - paths == set()


def test_the_settings_table_is_complete() -> None:
    assert set(variables()) - set(re.findall(r"BATON_[A-Z_]+", SETTINGS)) == set()


@cache
def anchors(page: Path) -> set[str]:
    """The names by which links reach the page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def pool_words() -> set[str]:
    """The names of the pool file's fields, and the words that they may have."""
    words = set()
    for _, entry in inspect.getmembers(entries, inspect.isclass):
        if issubclass(entry, entries.Entry):
            for name, declared in entry.model_fields.items():
                words |= {name, *literals(declared.annotation)}
    return words


def literals(annotation: Any) -> Iterator[str]:
    """The words among which a field of this type chooses."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        yield from arguments
        return
    for argument in arguments:
        yield from literals(argument)


@pytest.mark.parametrize("word", sorted(pool_words()))
def test_every_word_of_the_pool_file_is_described(word: str) -> None:
    guides = "\n".join(page.read_text() for page in PAGES if page.name not in ("changelog.md", "contributing.md"))
    code = re.findall(r"(?s)^```.*?^```|`[^`\n]+`", guides, re.MULTILINE)
    code.append((ROOT / "deploy" / "pool.example.toml").read_text())
    assert any(re.search(rf"(?<![\w-]){word}(?![\w-])", piece) for piece in code), "in no guide, in no example"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_of_every_page_exist(page: Path) -> None:
    text = page.read_text()
    paths = re.findall(r"`((?:deploy|tests|app|migrations)/[\w./-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
