"""Fixtures of the HTTP tests: a gateway over stand-ins, and a key that may do everything a caller may."""

import pytest

from tests.api.stand_ins import House, row_of, shelve_content


@pytest.fixture
def gateway() -> House:
    """A gateway whose store holds one run of the tenant `acme` and one of another."""
    house = House()
    house.store.rows = [row_of("run_mine", "acme"), row_of("run_theirs", "other")]
    shelve_content(house.store)
    return house


@pytest.fixture
def key(gateway: House) -> str:
    """A key of the tenant `acme`."""
    return gateway.add_key()
