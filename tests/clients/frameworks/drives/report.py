"""Shared by all programs: the service's URL, the questions, and the form of a report."""

import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import BaseModel

URL, KEY = os.environ["BATON_URL"], os.environ["BATON_API_KEY"]
V1 = f"{URL}/v1"
MINI, ULTRA, NOTHING, BROKEN = "baton-mini", "baton-ultra", "nothing", "baton-broken"
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="  # a PNG of one
)


class Place(BaseModel):
    """A place, and how warm it is there."""

    city: str
    degrees: int
    note: str | None = None


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: Where.
    """
    return f"Sunny in {city}."


def clock(zone: str) -> str:
    """Tells the time.

    Args:
        zone: Where.
    """
    return f"Noon in {zone}."


async def report_of(cases: Mapping[str, Callable[[], Awaitable[Any]]]) -> dict[str, Any]:
    """Return the outcome of each case, or its error if it failed."""
    return {name: await _outcome(case) for name, case in cases.items()}


async def _outcome(case: Callable[[], Awaitable[Any]]) -> Any:
    try:
        outcome = await case()
    except Exception as error:
        return {"error": type(error).__name__, "says": str(error)[:400]}
    return outcome.model_dump() if isinstance(outcome, BaseModel) else outcome


def publish(report: Mapping[str, Any]) -> None:
    """Print the report, the last line of the output."""
    sys.stdout.write("\n" + json.dumps(report) + "\n")
