"""The canonical form of a plan, and the SHA-256 by which an approval, a revision or a comparison names it.

    {"limits": {"attempts": 4, ..., "milliseconds": 300000, "usd_micros": 2000000},
     "steps": [{"access": ["user"], "answers": false, "instruction": "...", "tools": false, "worker": "ada"}, ...],
     "topology": "chain", "version": 1}

Two plans have the same digest if and only if they would have the same calls made within the same limits: by the same
workers, with the same instructions and with the same access lists, in the same order. A conductor's probabilities and
its reasons are not part of it. The JSON has sorted keys, no spaces, ASCII only and no fractions, so that others can
build the same bytes with any JSON library.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from app.core.plan.workflow import PREVIOUS, Access, Step, topology
from app.core.pool.catalog import Limits

VERSION = 1
"""The version of the form. A change that alters the bytes of any plan is another version."""
WHOLE_LIMITS = ("attempts", "depth", "fan_out", "output_tokens", "rounds", "steps", "tokens")
"""The limits that are part of the form under their own names; money and time follow as whole micro-dollars and
milliseconds."""


def plan_form(steps: Sequence[Step], limits: Limits, base: int = 0) -> dict[str, Any]:
    """Return the canonical form of a plan, in plain JSON values.

    `subtask` of a step is its instruction as text, or the ref of that text: digests of the one and of the other never
    agree, so that those who compare must use the same. A run's own records use refs, which outlive the text. Access
    lists may count in the plan (`base` 0) or in the run, whose number `base` is the plan's first step; a step before
    that stands in the form as `run:N`.
    """
    whole = {name: int(getattr(limits, name)) for name in WHOLE_LIMITS}
    spent = {"milliseconds": round(limits.seconds * 1000), "usd_micros": limits.usd}
    inputs = [step.access.places(base) for step in steps]
    return {
        "version": VERSION,
        "topology": topology(inputs) if inputs else "",
        "steps": [_step(step, base) for step in steps],
        "limits": whole | spent,
    }


def _step(step: Step, base: int) -> dict[str, Any]:
    return {
        "worker": step.worker,
        "instruction": step.subtask,
        "access": _access(step.access, base),
        "answers": step.answers,
        "tools": step.tools,
    }


def _access(access: Access, base: int) -> list[str | int]:
    """Return the access list, sorted and without repetitions, because neither changes what a step sees."""
    entries: list[str | int] = ["user"] if access.user else []
    if access.previous:
        entries.append(PREVIOUS)
    entries += [f"run:{n}" for n in sorted(set(access.steps)) if n < base]
    return [*entries, *sorted(set(access.places(base)))]


def digest(form: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a form of whole numbers, texts, truth values, lists and objects, in 64 hexadecimal
    digits."""
    return sha256(json.dumps(form, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def plan_digest(steps: Sequence[Step], limits: Limits, base: int = 0) -> str:
    """Return the SHA-256 of the canonical form of a plan; see `plan_form` for the arguments."""
    return digest(plan_form(steps, limits, base))
