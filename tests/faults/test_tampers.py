"""Tampers with a sealed database on Postgres, as `tests.audit.tampers` makes thousands of on SQLite."""

import random
from pathlib import Path

import pytest

from tests.audit.tampers import prepare, tamper_often

pytestmark = [pytest.mark.faults_suite, pytest.mark.integration]
COUNT = 60


async def test_tampers_are_found_on_postgres(migrated_postgres_url: str, tmp_path: Path) -> None:
    subject = await prepare(tmp_path, migrated_postgres_url)
    caught, missed = await tamper_often(subject, random.Random(5), COUNT)
    assert missed.total() == 0, missed
    assert caught.total() == COUNT
