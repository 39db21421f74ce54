"""One mark for each injection point says what a case breaks, where, and what must be true all the same.

    @at("F-07", "gateway killed before the commit", "not accepted: no run, no call")
    def test_...

Each pair of family and place is an injection point; the suite counts them and prints them with their results. Cases
with `ci=True` belong to the subset that `.ci/run` runs.
"""

from typing import Any

import pytest


def at(family: str, place: str, expectation: str, *, ci: bool = False) -> pytest.MarkDecorator:
    """Return one injection point, as a mark of a test."""
    return pytest.mark.point(family, place, expectation, ci=ci)


def case(*values: Any, family: str, place: str, expectation: str, ci: bool = False, name: str | None = None) -> Any:
    """Return one injection point, as one set of parameters of a test."""
    return pytest.param(*values, marks=at(family, place, expectation, ci=ci), id=name)
