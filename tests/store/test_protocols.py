"""The store's seam is several protocols of a few verbs each."""

from inspect import getmembers
from typing import Any

import pytest

from app.store.protocol import Store
from app.store.sql import SqlStore

MOST_VERBS = 10
PARTS = [part for part in Store.__mro__ if part not in (Store, object) and getattr(part, "_is_protocol", False)]


def verbs(kind: type) -> set[str]:
    """The public methods and properties that a class defines itself."""
    return {name for name, value in vars(kind).items() if not name.startswith("_") and _is_verb(value)}


def _is_verb(value: Any) -> bool:
    return callable(value) or isinstance(value, property)


@pytest.mark.parametrize("part", [part for part in PARTS if part.__name__ not in ("Protocol", "Generic")])
def test_each_part_of_the_store_can_be_read_at_once(part: type) -> None:
    assert 0 < len(verbs(part)) <= MOST_VERBS


def test_the_combined_store_adds_no_verb_of_its_own() -> None:
    assert verbs(Store) == set()


def test_the_sql_store_has_every_verb() -> None:
    promised = {name for part in PARTS for name in verbs(part)}
    assert promised <= {name for name, _ in getmembers(SqlStore)}
