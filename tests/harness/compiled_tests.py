"""`python -m tests.harness.compiled_tests` compiles all test files as pytest does when it first imports them.

Pytest rewrites the assertions of a file, and keeps what it has compiled beside what the interpreter keeps. In a new
checkout this took half of the time in which it collects the tests, and kept one core only; here, all cores do it. A
file that is changed later is compiled by pytest.
"""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final, cast

from _pytest.assertion import rewrite

TESTS: Final = Path(__file__).resolve().parents[1]
PATTERNS: Final = ("test_*.py", "conftest.py")
FILES_AT_A_TIME: Final = 8


def place_of_compiled(path: Path) -> Path:
    """Return where pytest looks for what it has compiled of a file."""
    return rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"


def compile_as_pytest_does(path: Path) -> None:
    """Compile one file."""
    place = place_of_compiled(path)
    if rewrite._read_pyc(path, place) is not None:
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    without_settings = cast(Any, None)
    source_hash, code = rewrite._rewrite_test(path, without_settings)
    rewrite._write_pyc(cast(Any, None), code, source_hash, place)


def main() -> None:
    """Compile all files."""
    paths: list[Path] = []
    for pattern in PATTERNS:
        paths += TESTS.rglob(pattern)
    with ProcessPoolExecutor() as pool:
        for _ in pool.map(compile_as_pytest_does, paths, chunksize=FILES_AT_A_TIME):
            pass


if __name__ == "__main__":
    main()
