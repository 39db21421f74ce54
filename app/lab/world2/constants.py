"""The frozen constants of world 2, read from `constants.toml`, where each stands with its range and its source.

`FROZEN` is the SHA-256 of that file. It was committed before any plan was searched and anything was trained in this
world; a test compares it with the file. The gap between baselines and optimum is whatever these figures make it.
"""

import hashlib
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from msgspec import Struct

VERSION = "world-2"
FROZEN = "a3f9bd073181eb30763920361eb63a89d7576fe0a81f841783f034255a002164"
DOMAINS = ("numbers", "calendar", "code", "logic", "language")
"""The order of all lists by domain."""
TRAITS = (-1.2711, -0.3247, 0.3247, 1.2711)
"""A task's hidden difficulty in standard deviations: the means of the four quarters of a normal distribution."""
DOCUMENT_TOKENS = (0, 3_000, 12_000)


class Constants(Struct, frozen=True):
    """The values of `constants.toml`, by the names of its tables. Effects are in logits, prices in dollars."""

    ability_mean: float
    ability_sd: float
    edge_sd: float
    trait_sd: float
    reason: tuple[float, ...]
    plan_good: float
    plan_bad: float
    plan_skill: float
    load: float
    length: tuple[float, ...]
    digest_keeps: float
    digest_lost: float
    truncated: float
    keeps: float
    finds_own: float
    finds_other: float
    check_skill: float
    pair: float
    majority: float
    unanimous: float
    handover: float
    judge_false_pass: float
    judge_false_fail: float
    price_low: float
    price_high: float
    input_share: float
    parts: tuple[float, ...]
    same_domain: float
    documents: tuple[float, ...]
    confidential: float
    retains: float
    question_tokens: float
    part_tokens: float
    solve_tokens: float
    reason_tokens: float
    plan_tokens: float
    digest_tokens: float
    check_tokens: float
    combine_tokens: float
    overhead_seconds: float
    read_per_second: float
    contexts: tuple[float, ...]
    speed_low: float
    speed_high: float
    cost: float
    full_usd: float
    wait: float
    full_seconds: float
    disclosure: float


@cache
def constants() -> Constants:
    """Return the values that the world uses."""
    values: dict[str, Any] = {}
    for name, entry in entries().items():
        value = entry["value"]
        values[name] = tuple(value) if isinstance(value, list) else float(value)
    return Constants(**values)


def entries() -> Mapping[str, Any]:
    """Return all tables of the file: value, range, source and how the source was read."""
    return tomllib.loads(_file().decode())


def digest() -> str:
    """Return the SHA-256 of the file as it is."""
    return hashlib.sha256(_file()).hexdigest()


def _file() -> bytes:
    return files(__package__).joinpath("constants.toml").read_bytes()
