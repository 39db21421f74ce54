"""`baton replay-dataset` runs the selector and baselines on recorded outcomes of models, read from files.

With an outcome of every model for each prompt it says what each router would have earned; from a log with one outcome
for each prompt it estimates that (`app/lab/replay.py`). It reads no journal and sends no request.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from msgspec.structs import asdict

from app.cli import terminal
from app.cli.arguments import Arguments
from app.errors import ConfigInvalid
from app.lab.offpolicy import Report
from app.lab.recorded_outcomes import Dataset, RecordsRefused, read, read_scores
from app.lab.replay import Figures, Plan, Routes, estimate_from_log, replay_outcomes, routes

UNITS: Mapping[str, str] = {
    "usd": "the mean dollars of a call",
    "tokens": "the mean tokens of a call",
    "calls": "the share of calls of the better model, since no costs are recorded",
}
LOG_NOTE = (
    "This is a log with one outcome for each prompt (bandit feedback): these are off-policy estimates and no results. "
    "APGR, AUC and regret cannot be known from it."
)
ASSUMPTION_NOTE = (
    "Lines without a propensity count as if the model had been drawn at random by its share of the log: the estimates "
    "are biased if the choice depended on the prompt."
)
COLUMNS: Mapping[str, tuple[str, bool]] = {
    "apgr": ("APGR", True),
    "auc": ("AUC", True),
    "cost_95": ("cost at 95 %", False),
    "regret": ("regret", False),
    "learning_regret": ("regret while learning", False),
}
"""The title of each figure, and True if more of it is better."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Print the figures. Returns 0; raises `ConfigInvalid` for files that are no data set."""
    if not 0 <= args.cost_weight <= 1:
        raise ConfigInvalid(["--cost-weight: write a share from 0 to 1"])
    plan = Plan(args.ratings, args.held_out, list(range(args.seeds)), args.cost_weight)
    try:
        scores: Mapping[str, float] = {}
        if args.scores:
            scores = read_scores(Path(args.scores))
        data = read([Path(name) for name in args.files], scores, _costs(args.cost))
        open_ = routes(data, plan.cost_weight)
        if data.full:
            _full(args, data, open_, plan)
        else:
            _log(args, data, open_, plan)
    except RecordsRefused as error:
        raise ConfigInvalid([str(error)]) from None
    except OSError as error:
        raise ConfigInvalid([f"{error.filename}: {error.strerror}"]) from None
    return 0


def _costs(texts: Sequence[str]) -> Mapping[str, float]:
    costs = {}
    for text in texts:
        model, _, amount = text.rpartition("=")
        try:
            costs[model] = float(amount)
        except ValueError:
            costs[model] = -1.0
        if not model or not 0 <= costs[model] <= 1e6:
            raise ConfigInvalid([f"--cost {text}: write MODEL=DOLLARS, the dollars of a usual call"])
    return costs


# -- full information


def _full(args: Arguments, data: Dataset, open_: Routes, plan: Plan) -> None:
    figures_by_policy = replay_outcomes(data, plan)
    if args.json:
        policies: dict[str, Any] = {}
        for name, figures in figures_by_policy.items():
            policies[name] = {**_summary(figures), "seeds": [asdict(figure) for figure in figures]}
        terminal.print_json({**_about(data, open_, plan), "feedback": "full information", "policies": policies})
        return
    _print_about(data, open_, plan)
    table = terminal.table()
    table.add_column("policy")
    for title, _ in COLUMNS.values():
        table.add_column(f"{title}, mean (worst)")
    for name, figures in figures_by_policy.items():
        summary = _summary(figures)
        cells = [_in_words(summary["mean"][key], summary["worst"][key]) for key in COLUMNS]
        terminal.add_row(table, (name, *cells))
    console = terminal.stdout()
    console.print(table)
    console.print(
        "The selector learns from the score of the model that it chose; the others from the scores of all models.",
    )


def _summary(figures: Sequence[Figures]) -> dict[str, dict[str, float | None]]:
    """Return the mean and the worst of each figure over the seeds in which it is defined."""
    mean: dict[str, float | None] = {}
    worst: dict[str, float | None] = {}
    for key, (_, rising) in COLUMNS.items():
        values = [getattr(figure, key) for figure in figures]
        numbers = [value for value in values if value is not None]
        mean[key] = worst[key] = None
        if numbers:
            mean[key], worst[key] = fmean(numbers), max(numbers)
        if numbers and rising:
            worst[key] = min(numbers)
    return {"mean": mean, "worst": worst}


def _in_words(mean: float | None, worst: float | None) -> str:
    if mean is not None and worst is not None:
        return f"{mean:.3f} ({worst:.3f})"
    return "-"


# -- a log


def _log(args: Arguments, data: Dataset, open_: Routes, plan: Plan) -> None:
    reports_by_policy = estimate_from_log(data, plan)
    notes = [LOG_NOTE]
    if any(row.propensity is None for row in data.rows):
        notes.append(ASSUMPTION_NOTE)
    if args.json:
        policies: dict[str, Any] = {}
        for name, reports in reports_by_policy.items():
            policies[name] = {**_summarize_reports(reports), "seeds": [_record(report) for report in reports]}
        about = {**_about(data, open_, plan), "feedback": "one outcome for each prompt", "notes": notes}
        terminal.print_json({**about, "policies": policies})
        return
    _print_about(data, open_, plan)
    console = terminal.stdout()
    for note in notes:
        console.print(note)
    table = terminal.table()
    for title in ("policy", "doubly robust, mean (worst)", "ahead of the log", "least ESS", "verdicts"):
        table.add_column(title)
    for name, reports in reports_by_policy.items():
        judgement = _summarize_reports(reports)
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in judgement["verdicts"].items())
        reward = _in_words(judgement["mean"], judgement["worst"])
        figures = f"{judgement['ahead']:+.3f}", f"{judgement['least_ess']:.0f}"
        terminal.add_row(table, (name, reward, *figures, verdicts))
    console.print(table)
    refusals: set[str] = set()
    for reports in reports_by_policy.values():
        refusals |= {report.refusal for report in reports if report.refusal}
    if refusals:
        console.print(f"refused, for example: {min(refusals)}")


def _summarize_reports(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the estimates of one policy over the seeds."""
    verdicts: dict[str, int] = {}
    for report in reports:
        verdicts[report.verdict] = verdicts.get(report.verdict, 0) + 1
    values = [report.dr.value for report in reports]
    return {
        "mean": fmean(values),
        "worst": min(values),
        "ahead": fmean([report.ahead.value for report in reports]),
        "least_ess": min(report.ess for report in reports),
        "verdicts": verdicts,
    }


def _record(report: Report) -> dict[str, Any]:
    return {**msgspec.to_builtins(report), "verdict": report.verdict, "refusal": report.refusal}


# -- both


def _about(data: Dataset, open_: Routes, plan: Plan) -> dict[str, Any]:
    scores = data.scores
    models = {}
    for model in data.models:
        models[model] = {"score": scores[model], "cost": data.costs.get(model), "routed": model in open_.models}
    return {
        "prompts": len(data.rows),
        "left_out": dict(data.left_out),
        "models": models,
        "cheapest": open_.models[0],
        "best": open_.models[-1],
        "cost_unit": data.unit,
        "cost_weight": plan.cost_weight,
        "ratings": plan.ratings,
        "held_out": plan.held_out,
    }


def _print_about(data: Dataset, open_: Routes, plan: Plan) -> None:
    console, scores = terminal.stdout(), data.scores
    cheapest, best = open_.models[0], open_.models[-1]
    console.print(
        f"{len(data.rows)} prompts, {len(plan.seeds)} seeds; costs are {UNITS[data.unit]}. The cheapest model is "
        f"{cheapest} (score {scores[cheapest]:.3f}), the best one {best} (score {scores[best]:.3f}).",
    )
    for model in data.models:
        if model not in open_.models:
            console.print(f"{model} is left out: it costs as much as the best model or more")
    for reason, count in data.left_out.items():
        console.print(f"left out: {count}, because {reason}")
