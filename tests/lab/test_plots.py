"""The plots of the documents: drawn from results that are kept, and each of them shown on the page."""

import json
from pathlib import Path

from app.lab import plots

DOCS = Path(__file__).resolve().parents[2] / "deploy" / "docs"


def test_the_learning_curves_are_read_from_the_published_tables() -> None:
    page = (DOCS / "world2.md").read_text()
    counts = [int(row["verdicts"].replace(",", "")) for row in plots.by_verdicts(page)]
    assert counts == sorted(counts), "tables have their rows by reward, curves go by verdicts"
    assert len(counts) >= 5
    assert len(counts) % len(plots.GAP.findall(page)) == 0, "as many budgets on every split"
    assert max(counts) >= 16_000


def test_the_other_plots_are_drawn_from_kept_results_and_shown() -> None:
    standings = json.loads((DOCS / "results" / "eval.json").read_text())["standings"]
    assert {standing["arm"].split(":")[0] for standing in standings} == {"baton-ultra", "oracle"}
    assert next(standing for standing in standings if standing["arm"] == "baton-ultra")["front"]
    selector = json.loads((DOCS / "results" / "selector.json").read_text())
    assert {len(run) for run in selector["regret"]} == {40}
    page = (DOCS / "evidence.md").read_text()
    for name in ("front", "learning", "regret", "calibration"):
        assert f"({name}.svg)" in page
        assert (DOCS / f"{name}.svg").stat().st_size < 60_000
