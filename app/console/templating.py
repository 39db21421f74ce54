"""Renders the templates of the console.

Everything that a template inserts is escaped, wherever it comes from; no template and no filter marks text as safe
(`tests/console/test_pages.py` holds that). An undefined name is an error.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import jinja2

from app.core.message.hidden_characters import HIDDEN
from app.core.plan.workflow import CONDUCTOR

TEMPLATES: Final = Path(__file__).parent / "templates"
NOTHING: Final = "\N{EN DASH}"
CONTROL: Final = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)} | {127: "␡"}
"""Control characters, each with the picture that Unicode has of it."""
DIRECTION: Final = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Marks that change the direction of the text behind them, which could make a text read as another."""
ERASURE_CAUSES: Final[Mapping[str, str]] = {
    "request": "by a request for this run",
    "retention": "because its time was over",
    "tenant": "with everything of its tenant",
    "user": "with everything of its end user",
    "operator": "by an operator's command",
}
APPROVAL_REASONS: Final[Mapping[str, str]] = {
    "requested": "its request",
    "tier": "its tier",
    "price": "its price",
    "further_plan": "an earlier plan of the run needed one",
}
"""The words for each reason why a plan needs an approval, by its name in the API."""
VISIBLE: Final = CONTROL | {code: f"[U+{code:04X}]" for code in (*DIRECTION, *sorted(HIDDEN))}
INVISIBLE: Final = re.compile(f"[{''.join(map(chr, VISIBLE))}]")


def environment() -> jinja2.Environment:
    """Return the templates with their filters."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    templates.filters |= {
        "usd": usd,
        "count": count,
        "seconds": seconds,
        "percent": percent,
        "when": when,
        "moment": moment,
        "plain": plain,
        "brief": brief,
        "source": source,
        "worker": worker,
        "placed": describe_source,
        "basis": basis,
        "needed": describe_approval_reason,
        "erased": describe_erasure,
    }
    return templates


def usd(amount: float | None) -> str:
    """Return dollars with as many digits as a small amount needs; a dash for None."""
    if amount is None:
        return NOTHING
    if amount == 0:
        return "$0"
    sign, size = "", abs(amount)
    if amount < 0:
        sign = "-"
    if size >= 10:
        return f"{sign}${size:,.2f}"
    if round(size, 2) == size:
        return f"{sign}${size:.2f}"
    if size >= 0.01:
        return f"{sign}${size:.4f}"
    return f"{sign}${size:.6f}"


def count(number: float | None) -> str:
    """Return a number with its thousands apart; a dash for None."""
    if number is None:
        return NOTHING
    return f"{number:,}"


def seconds(length: float | None) -> str:
    """Return a length of time in the unit that suits it; a dash for None."""
    if length is None:
        return NOTHING
    if length < 1:
        return f"{length * 1000:.0f} ms"
    if length < 120:
        return f"{length:.1f} s"
    minutes, rest = divmod(round(length), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def percent(share: float | None) -> str:
    """Return a share of one; a dash for None."""
    if share is None:
        return NOTHING
    return f"{share * 100:.1f} %"


def when(moment: float | str | None) -> str:
    """Return a time in UTC to the second: from seconds since 1970, or from the API's own text of it; a dash for
    None."""
    if moment is None:
        return NOTHING
    if isinstance(moment, str):
        return moment[:19].replace("T", " ")
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S")


def moment(at: float | str | None) -> str:
    """Return a time as `when` does, with its zone: for texts above which no column says it."""
    if at is None:
        return NOTHING
    return f"{when(at)} UTC"


def describe_erasure(erasure: Mapping[str, Any] | None) -> str:
    """Return the words that say when a run's content was erased, and by what."""
    if erasure is None:
        return "erased just now"  # after the run was read for this page
    if erasure["at"] is None:
        return "erased by an earlier release, which noted no time"
    return f"erased on {moment(erasure['at'])} {ERASURE_CAUSES[erasure['by']]}"


def plain(text: object) -> str:
    """Return a text with its invisible characters made visible; Jinja escapes it afterwards."""
    words = str(text)
    if INVISIBLE.search(words) is None:  # to search takes a tenth of the time
        return words
    return words.translate(VISIBLE)


def brief(text: object, length: int = 120) -> str:
    """Return the beginning of a text on one line, with the number of characters that are left out."""
    flat = " ".join(plain(text).split())
    if len(flat) <= length:
        return flat
    return f"{flat[:length]}… ({len(flat) - length:,} more characters)"


def source(name: str) -> str:
    """Return a source of an access list in words: `caller` and `user` are the conversation, `step:2` is a step."""
    if name in ("caller", "user"):
        return "the conversation"
    kind, _, number = name.partition(":")
    if not number:
        return name
    return f"{kind} {number}"


def worker(name: object) -> str:
    """Return the name of a worker, which may be the conductor of a nested workflow, with its invisible characters
    visible."""
    if name == CONDUCTOR:
        return "the conductor itself"
    return plain(name)


def describe_source(name: str) -> str:
    """Return an entry of an access list by its place in its run: `user`, or `1.0` for the first step of the first
    round."""
    round_, _, position = name.partition(".")
    if not position:
        return source(name)
    if "." in position:
        return f"step {name}"  # inside of a step
    if round_ == "1":
        return f"step {position}"
    return f"step {position} of round {round_}"


def basis(estimate: Mapping[str, Any]) -> str:
    """Return the words for what an estimate rests on."""
    runs = f"{count(estimate['runs'])} earlier runs"
    if estimate["runs"] == 1:
        runs = "1 earlier run"
    if estimate["basis"] == "prices":
        return "prices and usual sizes"
    if estimate["basis"] == "history":
        return runs
    return f"{runs}, and prices and usual sizes where they have none"


def describe_approval_reason(reason: str) -> str:
    """Return the words for why a plan needs an approval."""
    kind, _, name = reason.partition(":")
    if name:
        return f"the {kind} {plain(name)}"
    return APPROVAL_REASONS.get(kind, plain(kind))


def render(templates: jinja2.Environment, name: str, values: Mapping[str, Any]) -> str:
    """Return one template with these values."""
    return templates.get_template(name).render(values)
