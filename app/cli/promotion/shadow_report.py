"""`baton shadow report TIER` prints how a tier's live runs compare with their shadows."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.table import Table

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.core.pool.catalog import Catalog, Tier
from app.core.rating.shadows import notes_from_json, policy_of
from app.engine.conductors import trials, watch
from app.errors import ConfigInvalid
from app.process.config import Settings, configure

SHARES = ("success", "agreement", "answered", "degraded")
"""Figures that are shares of the runs."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Make the report. Returns 0, also where there are no pairs; 1 if `--gate` asks for more."""
    terminal.log_to_stderr("warning")
    config = configure(environ)
    tier = config.catalog.tier(args.tier)
    if tier is None:
        raise ConfigInvalid([f"{args.tier}: there is no such tier; use one of {', '.join(config.catalog.tiers)}"])
    storage.print_database(config.settings)
    figures = event_loop.run(_read(config.settings, config.catalog, tier, now() - args.since, now()))
    if args.json:
        terminal.print_json(figures)
    else:
        _print(figures)
    return int(args.gate and not _holds(figures))


def _holds(figures: Mapping[str, Any]) -> bool:
    """Return True if there is a candidate, and the conditions hold for each."""
    candidates = figures["candidates"]
    return bool(candidates) and all(candidate["promotable"] for candidate in candidates)


async def _read(settings: Settings, catalog: Catalog, tier: Tier, since: float, until: float) -> dict[str, Any]:
    async with storage.open_configured_store(settings) as store:
        notes = await store.find_learned_state(policy_of(tier.name), 0)
        draws: Mapping[str, int] = {}
        if notes is not None:
            draws = notes_from_json(notes.body).since(since)
        definitions = trials.PresentDefinitions(store, catalog)
        return await trials.report(store, definitions, tier, since, until, draws)


def _print(figures: Mapping[str, Any]) -> None:
    console = terminal.stdout()
    draws = ", ".join(f"{name} {count:,}" for name, count in figures["drawn"].items()) or "none yet"
    console.print(f"Runs of {figures['tier']} that were drawn: {draws}.", soft_wrap=True)
    for candidate in figures["candidates"]:
        _print_candidate(candidate)
    if not figures["candidates"]:
        console.print(f"[tiers.{figures['tier']}.shadow] is not in the pool file.")


def _print_candidate(candidate: Mapping[str, Any]) -> None:
    console = terminal.stdout()
    plans = ""
    if candidate["plans"]:
        plans = f"; {candidate['valid_plans']:,} of {candidate['plans']:,} plans valid"
    unfinished = ""
    if candidate["unfinished"]:
        unfinished = f"; {candidate['unfinished']:,} unfinished"
    console.print(f"\n{candidate['subject']}: {terminal.count(candidate['pairs'], 'pair')}{plans}{unfinished}")
    if not candidate["figures"]:
        console.print("Nothing is known yet: there is no pair of a run and its shadow that have ended.")
    else:
        console.print(_table(candidate["figures"]))
    if candidate["new_recipients"]:
        recipients = ", ".join(f"{name} ({count:,})" for name, count in candidate["new_recipients"].items())
        console.print(f"Shown callers' words in the shadow alone: {recipients}.", soft_wrap=True)
    if candidate["conditions"]:
        print_conditions(candidate["conditions"])
        outlook = ""
        if candidate["pairs_needed"]:
            outlook = f"; about {candidate['pairs_needed']:,} pairs decide"
        verdict = "not promotable"
        if candidate["promotable"]:
            verdict = "all hold"
        console.print(f"Conditions of promotion: {verdict}{outlook}.")
        if candidate["left_out"]:
            console.print(f"{watch.left_out_words(candidate['left_out'])}.")


def _table(figures: Iterable[Mapping[str, Any]]) -> Table:
    table = terminal.table("figure", "pairs", "users", "live", "shadow", "difference", "relative")
    for figure in figures:
        name = figure["name"]
        own, relative = "", ""
        if name != "agreement":
            own = _amount(name, figure["live"])
        if figure["relative"] is not None:
            relative = _interval("share", figure["relative"])
        table.add_row(
            name,
            f"{figure['count']:,}",
            f"{figure['users']:,}",
            own,
            _amount(name, figure["candidate"]),
            _interval(name, figure["difference"]),
            relative,
        )
    return table


def print_conditions(conditions: Iterable[Mapping[str, Any]]) -> None:
    """Print conditions of a promotion, each with its evidence."""
    table = terminal.table("condition", "limit", "found", "pairs", "needed", "outcome")
    for condition in conditions:
        limit, found_text = f"{condition['limit']:+.1%}", "nothing"
        if condition["found"] is not None:
            found_text = _interval("share", condition["found"])
        if condition["name"] == "min_pairs":
            limit, found_text = f"{condition['limit']:,.0f}", ""
        need = "-"
        if condition["needed"] is not None:
            need = f"{condition['needed']:,}"
        table.add_row(condition["name"], limit, found_text, f"{condition['count']:,}", need, condition["outcome"])
    terminal.stdout().print(table)


def _interval(name: str, interval: Mapping[str, float | None]) -> str:
    ends = [_amount(name, interval[end]) for end in ("low", "high")]
    return f"{_amount(name, interval['value'])} [{ends[0]}, {ends[1]}]"


def _amount(name: str, value: float | None) -> str:
    if value is None:
        return "?"
    if name in (*SHARES, "share"):
        return f"{value:.1%}"
    if name == "cost_usd":
        return f"${value:.6f}"
    return f"{value:.2f}"
