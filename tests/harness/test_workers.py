"""The workers that run the tests: nothing runs twice, nothing is left out, and a worker that dies is a failure."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
ALONE: Final = ("-c", os.devnull, "-p", "no:cacheprovider", "-p", "tests.harness.workers", "--workers")


def _run(folder: Path, *options: str, **files: str) -> tuple[int, str]:
    """Run these files by pytest with nothing but the workers; return the exit status, and what was printed."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(dedent(text))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *ALONE, *options, f"--rootdir={folder}", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_each_test_runs_once_beside_those_of_its_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    file = f"""
        import os, pytest
        from pathlib import Path

        def write(what):
            with open({str(log)!r}, "a") as file:
                file.write(f"{{what}} {{os.getpid()}}\\n")

        @pytest.fixture(scope="module", autouse=True)
        def shared():
            write(f"begin {{__name__}}")
            yield
            write(f"end {{__name__}}")

        @pytest.mark.parametrize("number", range(3))
        def test_one(number, tmp_path):
            write(f"{{__name__}} {{number}} {{tmp_path}}")
    """
    status, said = _run(tmp_path, "2", **dict.fromkeys("abcd", file))
    assert status == 0
    assert "12 passed" in said
    lines = log.read_text().splitlines()
    folders = [line.split()[2] for line in lines if line.startswith("test_")]
    assert len(folders) == len(set(folders)) == 12
    for name in "abcd":
        words = [line.split() for line in lines if f"test_{name} " in f"{line} "]
        assert len({each[-1] for each in words}) == 1, "one process has the whole file"
        ran = [each[:2] for each in words]
        own = f"test_{name}"
        assert ran == [["begin", own], [own, "0"], [own, "1"], [own, "2"], ["end", own]]


def test_a_failure_is_shown_with_what_was_printed(tmp_path: Path) -> None:
    status, said = _run(
        tmp_path,
        "2",
        bad="""
        def test_wrong():
            print("words of the test")
            assert 1 + 1 == 3
        """,
        good="def test_right(): print('words that nobody needs')",
    )
    assert status == 1
    assert "1 failed, 1 passed" in said
    assert "words of the test" in said
    assert "assert (1 + 1) == 3" in said
    assert "words that nobody needs" not in said


def test_whatever_a_worker_does_not_finish_has_failed(tmp_path: Path) -> None:
    status, said = _run(
        tmp_path,
        "2",
        dying="""
        import os
        def test_before(): pass
        def test_death(): os._exit(0)
        def test_after(): pass
        """,
        other="def test_elsewhere(): pass",
    )
    assert status == 1
    assert "2 failed, 2 passed" in said
    assert "The worker has ended with status 0 in the middle of this test." in said
    assert "The worker that was to run this test has ended before." in said


def test_no_file_waits_for_a_worker_that_is_busy(tmp_path: Path) -> None:
    met = f"""
        import os, time
        from pathlib import Path

        def test_others_come_meanwhile():
            mine, deadline = Path({str(tmp_path)!r}, f"{{__name__}}.here"), time.monotonic() + 60
            mine.touch()
            while len(list(mine.parent.glob("*.here"))) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert time.monotonic() < deadline
    """
    status, said = _run(tmp_path, "3", **dict.fromkeys("abc", met))
    assert status == 0, said


def test_one_failure_may_end_it_all(tmp_path: Path) -> None:
    status, said = _run(
        tmp_path,
        *("2", "--maxfail=1"),
        endless="""
        import time
        def test_endless(): time.sleep(100)
        """,
        wrong="def test_wrong(): assert False",
    )
    assert status == 1
    assert "1 failed" in said
    assert "stopping after 1 failures" in said
