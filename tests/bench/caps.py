"""`python -m tests.bench.caps`: what runs do whose budget is small, over the tasks of the rehearsal.

Each run has one random cap, of money or of time, on a random tier: `baton-mini` (one worker), `baton-ultra` (a model
conducts), and `baton-select` (a selector). The table has, for each band of caps: the runs that were refused although
the cap bears the cheapest worker's worst case at the tier's floor (which must be none), those that were answered, those
whose answer was right, and the money that they cost. `--svg PATH` draws it, together with the runs that an earlier
measurement wrote with `--json` where `--before PATH` names them.

The service is the real one, in this process, over SQLite and the simulated workers, with a clock that waits for nobody
(`tests/harness/skipped_time.py`), so that what a machine does beside it counts for nothing. The workers pause thirty
times as long as they usually do where caps of time are drawn, and not at all where caps of money are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.resources import files
from math import exp, log
from pathlib import Path
from random import Random
from typing import Any

import httpx
from msgspec import Struct
from msgspec.structs import asdict

from app.core.message.chat import Task
from app.core.pool.catalog import MILLION, Catalog
from app.core.pool.policy import input_bound, worst_case
from app.lab.calibration_tasks import FORM, BuiltIn, make_built_in_tasks
from app.process.wiring import Runtime
from tests.harness.in_process import client_of, running_service
from tests.harness.skipped_time import run_skipping

TIERS = ("baton-mini", "baton-ultra", "baton-select")
SELECT = """
[tiers.baton-select]
pool = "all"
conductor = { kind = "selector" }
limits = { steps = 5, fan_out = 4, tokens = 200_000, usd = 1.00, seconds = 180, output_tokens = 4_096 }
"""
FLOOR_TOKENS = 256
"""The floor of a tier that does not set its own; a tree of before has none, and is measured by this one."""
USD = (0.00005, 0.02)
"""Dollars between which caps of money are drawn, evenly by their logarithm."""
SECONDS = (0.6, 36.0)
"""Seconds between which caps of time are drawn in the same way."""
SLOWER = 30
AT_ONCE = {"usd": 4, "seconds": 64}
BANDS = 8
QUIET = {"BATON_LOG_LEVEL": "error", "BATON_LEASE_SECONDS": "300"}


class CappedRun(Struct, frozen=True):
    """One run: its cap in dollars or seconds, and what came of it."""

    kind: str
    tier: str
    cap: float
    fits: bool
    """True if the cap bears the cheapest worker's worst case at the floor, or the quickest worker's answer."""
    status: int
    code: str
    right: bool
    usd: float
    degraded: bool
    finish: str

    @property
    def answered(self) -> bool:
        """True if the caller got an answer."""
        return self.status == 200


def pool_of(delay: int) -> str:
    """Return the pool of the rehearsal with a tier that a selector conducts, whose workers solve the built-in tasks and
    none of the second world's; `delay` is a factor on their pauses."""
    text = files("app.process.config").joinpath("rehearsal.toml").read_text()
    options = f'options = {{ delay = "{delay}", positional = true'
    return text.replace('options = { world = "2", positional = true', options) + SELECT


def draw_cap(random: Random, between: tuple[float, float]) -> float:
    """Return a cap, evenly by its logarithm."""
    low, high = log(between[0]), log(between[1])
    return exp(random.uniform(low, high))


def cheapest(catalog: Catalog, tier: str, task: Task) -> int:
    """Return the worst case of the cheapest worker of a tier at the floor, in micro-dollars."""
    tier_spec = catalog.tiers[tier]
    floor = getattr(tier_spec.efforts[tier_spec.effort], "floor_tokens", FLOOR_TOKENS)
    size = input_bound(task.messages)
    return min(worst_case(catalog.workers[name], size, floor).usd for name in tier_spec.pool)


async def play_capped_run(
    runtime: Runtime, client: httpx.AsyncClient, random: Random, kind: str, quickest: float
) -> CappedRun:
    """Play one run with a random cap of this kind."""
    tier, task = random.choice(TIERS), random.choice(make_built_in_tasks())
    cap = draw_cap(random, USD if kind == "usd" else SECONDS)
    catalog = runtime.pool.catalog()
    paid = int(cap * MILLION) >= cheapest(catalog, tier, task.task)
    fits = paid if kind == "usd" else cap >= quickest
    body = {
        "model": tier,
        "messages": [{"role": "system", "content": FORM}, {"role": "user", "content": task.question}],
        "baton": {"budget": {kind: cap}},
    }
    reply = await client.post("/v1/chat/completions", json=body)
    value: dict[str, Any] = reply.json()
    row = await runtime.context.store.run(reply.headers["x-baton-run"])
    answered = reply.status_code == 200
    choice = value["choices"][0] if answered else {}
    return CappedRun(
        kind=kind,
        tier=tier,
        cap=cap,
        fits=fits,
        status=reply.status_code,
        code="" if answered else value["error"]["code"],
        right=answered and _right(task, choice["message"]["content"]),
        usd=row.spent.usd / MILLION,
        degraded=answered and bool(value["baton"]["degraded"]),
        finish=choice.get("finish_reason", ""),
    )


def _right(task: BuiltIn, answer: str) -> bool:
    grade = task.grader.grade(answer)
    return bool(grade.score >= 1.0)


async def quickest_answer(client: httpx.AsyncClient) -> float:
    """Return the seconds that the slowest of a few answers of the quickest worker takes: a cap below them fits
    nobody."""
    clock = asyncio.get_running_loop().time
    took = []
    for task in make_built_in_tasks()[:6]:
        began = clock()
        body = {
            "model": "baton-mini",
            "messages": [{"role": "system", "content": FORM}, {"role": "user", "content": task.question}],
            "baton": {"pool": {"pin": "rehearsal-scribe"}},
        }
        (await client.post("/v1/chat/completions", json=body)).raise_for_status()
        took.append(clock() - began)
    return max(took)


async def play(count: int, kind: str, seed: int) -> list[CappedRun]:
    """Play so many runs with caps of one kind."""
    random, gate = Random(f"{seed} {kind}"), asyncio.Semaphore(AT_ONCE[kind])
    with tempfile.TemporaryDirectory() as folder:
        pool = pool_of(SLOWER if kind == "seconds" else 0)
        async with running_service(Path(folder), pool, QUIET) as runtime, client_of(runtime) as client:
            quickest = await quickest_answer(client) if kind == "seconds" else 0.0

            async def one(number: int) -> CappedRun:
                async with gate:
                    return await play_capped_run(runtime, client, Random(f"{seed} {kind} {number}"), kind, quickest)

            return await asyncio.gather(*[one(random.randrange(1 << 30)) for _ in range(count)])


def bands(runs: Sequence[CappedRun]) -> list[list[CappedRun]]:
    """Return the runs by their caps, in bands of nearly the same number."""
    ordered = sorted(runs, key=lambda run: run.cap)
    size = max(-(-len(ordered) // BANDS), 1)
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def table(runs: Sequence[CappedRun], kind: str) -> list[str]:
    """Return the lines of a Markdown table."""
    unit = "dollars" if kind == "usd" else "seconds"
    lines = [
        f"| cap, {unit} | runs | fit the floor | refused of those | answered | degraded | right | dollars a run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(f"{band[0].cap:.5f} to {band[-1].cap:.5f}", band) for band in bands(runs)]
    return [*lines, _row(f"all {len(runs)}", runs)]


def _row(name: str, band: Sequence[CappedRun]) -> str:
    fit = [run for run in band if run.fits]
    figures = [
        len(band),
        len(fit),
        sum(not run.answered for run in fit),
        sum(run.answered for run in band),
        sum(run.degraded for run in band),
        sum(run.right for run in band),
    ]
    usd = sum(run.usd for run in band) / len(band)
    return f"| {name} | {' | '.join(map(str, figures))} | {usd:.6f} |"


def summary(runs: Sequence[CappedRun], kind: str) -> list[str]:
    """Return the lines that name how runs ended without an answer although their cap fits."""
    lines = []
    for tier in TIERS:
        own = [run for run in runs if run.tier == tier and run.fits]
        lost = [run for run in own if not run.answered]
        spent = sum(run.usd > 0 for run in lost)
        codes = ", ".join(sorted({run.code for run in lost})) or "none"
        lines.append(
            f"{kind} {tier}: {len(own)} fit, {len(lost)} without an answer ({codes}), {spent} after spending, "
            f"{sum(run.right for run in own)} right"
        )
    return lines


def chart(runs: Sequence[CappedRun], before: Sequence[CappedRun], kind: str, top: int) -> list[str]:
    """Return the lines of one chart in SVG: the shares of runs that were answered and right, and dollars a run, by
    cap."""
    low, high = (log(edge) for edge in (USD if kind == "usd" else SECONDS))
    caps = []
    for band in bands(runs):
        caps.append((log(sum(run.cap for run in band) / len(band)) - low) / (high - low))
    dearest = max([_mean_usd(band) for band in (*bands(runs), *bands(before or runs))]) or 1.0
    unit = "dollars" if kind == "usd" else "seconds"
    edges = f"{exp(low):g} to {exp(high):g} {unit}, logarithmic"
    lines = [
        f'<text x="{LEFT}" y="{top - 8}">caps of {edges}; dollars a run: up to {dearest:.4f}</text>',
        f'<rect x="{LEFT}" y="{top}" width="{WIDE}" height="{HIGH}" fill="none" stroke="#999"/>',
    ]
    for place, (name, colour, value) in enumerate(CURVES):
        lines.append(f'<text x="{LEFT + 150 * place}" y="{top + HIGH + 16}" fill="{colour}">{name}</text>')
        for drawn_runs, dash in ((runs, ""), (before, ' stroke-dasharray="4 3"')):
            if not drawn_runs:
                continue
            values = [value(band) / (dearest if name == DOLLARS else 1.0) for band in bands(drawn_runs)]
            points = [f"{LEFT + x * WIDE:.0f},{top + HIGH * (1 - y):.0f}" for x, y in zip(caps, values, strict=False)]
            lines.append(f'<polyline fill="none" stroke="{colour}"{dash} points="{" ".join(points)}"/>')
    return lines


def svg(runs: Sequence[CappedRun], before: Sequence[CappedRun]) -> str:
    """Return a plot of each kind of caps; dashed lines are those of an earlier measurement, if there is one."""
    present = {run.kind for run in runs}
    kinds = [kind for kind in ("usd", "seconds") if kind in present]
    height = len(kinds) * (HIGH + 70) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE + 2 * LEFT}" height="{height}" font-size="12" '
        'font-family="sans-serif">',
        f'<rect width="{WIDE + 2 * LEFT}" height="{height}" fill="white"/>',
    ]
    for place, kind in enumerate(kinds):
        now = [run for run in runs if run.kind == kind]
        then = [run for run in before if run.kind == kind]
        lines += chart(now, then, kind, 30 + place * (HIGH + 70))
    return "\n".join([*lines, "</svg>", ""])


def _share(band: Sequence[CappedRun], count: int) -> float:
    return count / len(band) if band else 0.0


def _mean_usd(band: Sequence[CappedRun]) -> float:
    return sum(run.usd for run in band) / len(band) if band else 0.0


DOLLARS = "dollars a run"
CURVES: Sequence[tuple[str, str, Callable[[Sequence[CappedRun]], float]]] = (
    ("answered", "#1f77b4", lambda band: _share(band, sum(run.answered for run in band))),
    ("right", "#2ca02c", lambda band: _share(band, sum(run.right for run in band))),
    (DOLLARS, "#d62728", _mean_usd),
)
LEFT, WIDE, HIGH = 40, 480, 160
"""Pixels of the plot's margin, and of each chart."""


def main() -> int:
    """See the module docstring. Returns 1 if a run was refused whose cap of money fits."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.caps")
    parser.add_argument("--caps", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=("usd", "seconds"))
    parser.add_argument("--json", type=Path, help="write the runs to this file")
    parser.add_argument("--svg", type=Path, help="draw them into this file")
    parser.add_argument("--before", type=Path, help="runs of an earlier measurement, to be drawn as dashed lines")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    before = (
        [CappedRun(**entry) for entry in json.loads(options.before.read_text())] if options.before is not None else []
    )
    kinds = (options.kind,) if options.kind else ("usd", "seconds")
    runs: list[CappedRun] = []
    for kind in kinds:
        outcomes = run_skipping(play(options.caps // len(kinds), kind, options.seed))
        print(*table(outcomes, kind), "", *summary(outcomes, kind), "", sep="\n")
        runs += outcomes
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(run) for run in runs]))
    if options.svg is not None:
        options.svg.write_text(svg(runs, before))
    return int(any(run.fits and not run.answered for run in runs if run.kind == "usd"))


if __name__ == "__main__":
    sys.exit(main())
