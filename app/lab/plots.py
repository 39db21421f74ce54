"""`python -m app.lab.plots` draws the plots of deploy/docs/evidence.md from kept results, as small SVG files.

It reads `results/` in the folder of the documents (`baton eval` and `python -m app.lab.world2 --selector` wrote it) and
the tables of `world2.md`, which `python -m app.lab.world2` writes. It needs matplotlib: `pip install 'baton[plots]'`.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeAlias

Figure: TypeAlias = Any
"""A figure of matplotlib, which is imported by name: only who draws needs it."""
FOLDER = Path("deploy/docs")
SIZE = (6.4, 3.6)
"""Inches."""
SECTION = re.compile(r"^### (?P<name>.+)$", re.MULTILINE)
LEARNED = re.compile(
    r"^\| learned from (?P<verdicts>[\d,]+) verdicts \| [^|]+\| [^|]+\| "
    r"(?P<mean>[-+.\d]+) \[(?P<low>[-+.\d]+), (?P<high>[-+.\d]+)\]",
    re.MULTILINE,
)
GAP = re.compile(r"^\| searched optimum \| [^|]+\| [^|]+\| (?P<mean>[-+.\d]+)", re.MULTILINE)


def main() -> int:
    """Draw all plots."""
    parser = argparse.ArgumentParser(prog="python -m app.lab.plots", description=main.__doc__)
    parser.add_argument("--docs", type=Path, default=FOLDER, help="the folder of the documents (deploy/docs)")
    docs = parser.parse_args().docs
    resolve_name("matplotlib").rcParams.update({"svg.hashsalt": "baton", "svg.fonttype": "none", "font.size": 9})
    standings = json.loads((docs / "results" / "eval.json").read_text("utf-8"))["standings"]
    selector = json.loads((docs / "results" / "selector.json").read_text("utf-8"))
    _save(front(standings), docs / "front.svg")
    _save(curves((docs / "world2.md").read_text("utf-8")), docs / "learning.svg")
    _save(regret(selector), docs / "regret.svg")
    _save(calibration(selector), docs / "calibration.svg")
    return 0


def front(standings: Sequence[dict[str, Any]]) -> Figure:
    """Draw accuracy and dollars a task of the arms of an evaluation, with 95 % intervals over tasks."""
    figure = _figure()
    axes = figure.add_subplot(xlabel="dollars a task", ylabel="accuracy")
    for standing in standings:
        if standing["arm"] == "oracle":
            continue
        value = standing["accuracy"]
        spread = [[value["value"] - value["low"]], [value["high"] - value["value"]]]
        shape = "s" if standing["front"] else "o"
        axes.errorbar(standing["usd"], value["value"], spread, fmt=shape, capsize=2, label=_short(standing["arm"]))
    axes.legend(fontsize=7, title="squares: the front", title_fontsize=7)
    axes.set_xlim(left=0)
    return figure


def curves(page: str) -> Figure:
    """Draw the reward of learned policies above the best plan by domain, by their verdicts, and that of the optimum."""
    figure = _figure()
    axes = figure.add_subplot(xlabel="verdicts, one for each execution", ylabel="reward above the best plan by domain")
    axes.set_xscale("log")
    sections = list(SECTION.finditer(page))
    for place, section in enumerate(sections):
        end = sections[place + 1].start() if place + 1 < len(sections) else len(page)
        text = page[section.end() : end]
        rows = by_verdicts(text)
        if not rows:
            continue
        verdicts = [_verdicts(row) for row in rows]
        (line,) = axes.plot(verdicts, [float(row["mean"]) for row in rows], marker=".", label=section["name"])
        axes.set_xticks(verdicts, [f"{count:,}" for count in verdicts])
        axes.minorticks_off()
        low, high = [float(row["low"]) for row in rows], [float(row["high"]) for row in rows]
        axes.fill_between(verdicts, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        if best := GAP.search(text):
            axes.axhline(float(best["mean"]), color=line.get_color(), linestyle=":", linewidth=0.8)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.legend(fontsize=7, title="dotted: searched optimum", title_fontsize=7)
    return figure


def by_verdicts(text: str) -> list[re.Match[str]]:
    """Return the rows of learned policies in a table, those with the fewest verdicts first."""
    return sorted(LEARNED.finditer(text), key=_verdicts)


def _verdicts(row: re.Match[str]) -> int:
    return int(row["verdicts"].replace(",", ""))


def regret(selector: dict[str, Any]) -> Figure:
    """Draw the cumulative regret of a selector that begins without ratings: each seed and their mean."""
    figure = _figure()
    axes = figure.add_subplot(xlabel="decisions", ylabel="cumulative regret in reward")
    runs = selector["regret"]
    places = [selector["every"] * (n + 1) for n in range(len(runs[0]))]
    for run in runs:
        axes.plot(places, run, color="tab:blue", alpha=0.3, linewidth=0.8)
    means = [sum(column) / len(runs) for column in zip(*runs, strict=True)]
    axes.plot(places, means, color="tab:blue", label=f"mean of {len(runs)} seeds")
    first = [means[0] / places[0] * place for place in places]
    axes.plot(places, first, color="grey", linestyle=":", label="as at first")
    axes.legend(fontsize=7)
    return figure


def calibration(selector: dict[str, Any]) -> Figure:
    """Draw the selector's estimates of the chance of a right answer, and the share of right answers, by tenths."""
    figure = _figure()
    axes = figure.add_subplot(xlabel="estimated chance of a right answer", ylabel="share of right answers")
    axes.plot([0, 1], [0, 1], color="grey", linestyle=":")
    estimates, right, counts = zip(*selector["calibration"], strict=True)
    axes.scatter(estimates, right, s=[10 + count / 10 for count in counts])
    for x, y, count in selector["calibration"]:
        axes.annotate(f"{count}", (x, y), textcoords="offset points", xytext=(6, -8), fontsize=7)
    return figure


def _figure() -> Figure:
    return resolve_name("matplotlib.figure").Figure(figsize=SIZE, layout="constrained")


def _short(arm: str) -> str:
    return (arm.partition(":")[2] or arm).replace("rehearsal-", "")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    raise SystemExit(main())
