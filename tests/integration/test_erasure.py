"""Erasing one user's content while the service runs: nothing of theirs can be found, and nothing else is touched."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.erasure import erase_one_of_two_users

RUNS = 20


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.integration)])
def test_no_word_of_an_erased_user_is_left(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, make_schema: Callable[[str], None]
) -> None:
    """`python -m tests.bench.erasure` is the same with 10,000 runs, `pg_dump` and the files of Postgres."""
    (tmp_path / "data").mkdir()
    url = f"sqlite:///{tmp_path}/data/baton.db"
    if kind == "postgres":
        url = request.getfixturevalue("migrated_postgres_url")
    make_schema(url)
    remainders = asyncio.run(erase_one_of_two_users(tmp_path, url, RUNS))
    assert remainders.places == {}
    assert remainders.files == {}
    assert remainders.violations == []
    assert remainders.unverifiable == {"erased": RUNS // 2}
    assert remainders.others >= RUNS // 2
