"""The views of a run that the console draws, on a terminal of 80 columns and without colour as well.

Each is drawn of the JSON that the API gives: `GET /v1/runs/{id}/graph`, `/timeline` and `/state`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.text import Text

from app.cli.runs import run_words
from app.cli.terminal import clean, count, dollars, duration, moment
from app.core.pool.catalog import MILLION

MARKS: Final[Mapping[str, str]] = {
    "queue": ".",
    "planning": "p",
    "people": "?",
    "retry": "~",
    "first_word": "-",
    "stream": "=",
    "tools": "t",
}
"""The mark of each kind of time in a bar. Colour only repeats it."""
COLOURS: Final[Mapping[str, str]] = {"people": "yellow", "tools": "yellow", "retry": "red", "stream": "green"}
PHASE_TEXTS: Final[Mapping[str, str]] = {
    "queue": "queue",
    "planning": "planning",
    "people": "waits for people",
    "retry": "retry",
    "first_word": "waits for the first word",
    "stream": "streams",
    "tools": "waits for tools",
}
CONTENT_TEXTS: Final[Mapping[str, str]] = {
    "conversation": "the conversation",
    "subtask": "the subtask",
    "output": "the output",
    "task": "the task",
    "tool_results": "results of tools",
    "answer": "the answer",
}
REASON_TEXTS: Final[Mapping[str, str]] = {
    "not_listed": "not on the access list",
    "no_output": "there was no output",
    "policy": "by policy",
}
LABEL_COLUMNS: Final = 26
FIGURE_COLUMNS: Final = 22
MIN_BAR_COLUMNS: Final = 10
LEGEND_WORDS: Final = 4
"""Marks that are explained in one line."""
MIN_WAIT_SECONDS: Final = 0.001
"""Waits for a slot that are shorter have no row."""

Document = Mapping[str, Any]


def graph(document: Document) -> Iterator[Text]:
    """Yield the nodes in their layers, each with what it was granted (`<==`) and what was withheld from it (`x..`)."""
    yield heading(document)
    edges: dict[str, list[Document]] = {}
    for edge in document["edges"]:
        edges.setdefault(edge["target"], []).append(edge)
    for node in sorted(document["nodes"], key=lambda node: (node["x"], node["y"])):
        yield _node(node)
        for edge in edges.get(node["id"], ()):
            yield _edge(edge)


def _node(node: Document) -> Text:
    line = Text(f"{'  ' * node['x']}{_name(node['id'])}", style="bold")
    if node["kind"] == "caller":
        return line
    line.append(f"  {clean(node['worker'] or node['planned_worker'] or '')}", style="cyan")
    line.append(f"  {_words(node['state'])}")
    if node["replaced"]:
        line.append("  replaced by another plan", style="dim")
    if node["answers"]:
        line.append("  * answers")
    if node["attempts"]:
        calls = count(len(node["attempts"]), "call")
        line.append(f"  {calls}, {duration(node['seconds'])}, {_money(node['cost_usd'])}")
    if node["error"]:
        line.append(f"  {clean(node['error'])}", style="red")
    return line


def _edge(edge: Document) -> Text:
    indent, source = " " * 6, _name(edge["source"])
    content = CONTENT_TEXTS[edge["what"]]
    if edge["kind"] == "granted":
        line = f"{indent}<== {source}: {content}"
        if not edge["sent"]:
            line += " (not sent)"
        return Text(line, style="dim")
    line = f"{indent}x.. {source}: {content} withheld"
    if edge["worker"]:
        line += f" from {clean(edge['worker'])}"
    reason = REASON_TEXTS[edge["reason"]]
    if edge["by"]:
        reason += f", {clean(edge['by'])}"
    return Text(f"{line} ({reason})", style="yellow")


def timeline(document: Document, width: int, *, by_money: bool) -> Iterator[Text]:
    """Yield the spans as bars on one axis of this many columns in all, by seconds or by money."""
    yield heading(document)
    columns = max(width - LABEL_COLUMNS - FIGURE_COLUMNS - 2, MIN_BAR_COLUMNS)
    total = document["length_seconds"]
    if by_money:
        total = document["cost_usd"]
    phases = _phases(document["spans"])
    for span in document["spans"]:
        if _has_no_row(span, by_money=by_money):
            continue
        yield _row(span, phases.get(span["id"], (span,)), total, columns, by_money=by_money)
    if not by_money:
        words = [f"{mark} {PHASE_TEXTS[kind]}" for kind, mark in MARKS.items()]
        yield Text("  ".join(words[:LEGEND_WORDS]), style="dim")
        yield Text("  ".join(words[LEGEND_WORDS:]), style="dim")


def _has_no_row(span: Document, *, by_money: bool) -> bool:
    if by_money and span["cost_usd"] is None:
        return True
    is_short = span["kind"] == "queue" and span["end"] is not None and span["seconds"] < MIN_WAIT_SECONDS
    return is_short or span["kind"] in ("first_word", "stream")


def _phases(spans: Sequence[Document]) -> Mapping[str, Sequence[Document]]:
    """Return the phases of each attempt."""
    phases: dict[str, list[Document]] = {}
    for span in spans:
        if span["kind"] in ("first_word", "stream"):
            phases.setdefault(span["parent"], []).append(span)
    return phases


def _row(span: Document, parts: Sequence[Document], total: float, columns: int, *, by_money: bool) -> Text:
    name = "  " * span["depth"] + _span_name(span)
    if len(name) >= LABEL_COLUMNS:
        name = f"{name[: LABEL_COLUMNS - 2]}…"
    line = Text(f"{name:<{LABEL_COLUMNS}}")
    if by_money:
        line.append_text(_bar([(span["cost_start_usd"], span["cost_usd"], "#", "")], total, columns))
        return line.append(f" {_money(span['cost_usd']):>{FIGURE_COLUMNS}}")
    pieces = []
    for part in parts:
        mark, colour = MARKS.get(part["kind"], "_"), COLOURS.get(part["kind"], "")
        pieces.append((part["start"], part["seconds"], mark, colour))
    line.append_text(_bar(pieces, total, columns))
    figure = duration(span["seconds"])
    if span["end"] is None:
        figure += " so far"
    words = f" {figure:>9}"
    if span["error"]:
        words += f" {clean(span['error'])}"
    if len(words) > FIGURE_COLUMNS:
        words = f"{words[: FIGURE_COLUMNS - 1]}…"
    return line.append(words)


def _bar(pieces: Sequence[tuple[float, float, str, str]], total: float, columns: int) -> Text:
    """Return a bar of pieces, each with start, length, mark and colour; the shortest piece still has one column."""
    scale = 0.0
    if total > 0:
        scale = columns / total
    line = Text()
    for start, length, mark, colour in pieces:
        first = min(int(start * scale), columns - 1)
        last = min(max(int((start + length) * scale + 0.5), first + 1), columns)
        line.append(" " * (first - len(line)))
        line.append(mark * (last - len(line)), style=colour)
    line.append(" " * (columns - len(line)))
    return line


def _span_name(span: Document) -> str:
    names = {
        "run": "run",
        "round": f"round {span['round']}",
        "planning": f"plan {span['proposal']}",
        "step": f"step {span['step']}",
        "attempt": clean(span["worker"] or "call"),
    }
    return names.get(span["kind"]) or PHASE_TEXTS.get(span["kind"], span["kind"])


def state(document: Document) -> Iterator[Text]:
    """Yield the exact state at the instant."""
    yield heading(document)
    waits = None
    if document["waits"]:
        waits = f"{document['waits']['kind']}, until {moment(document['waits']['until'])}"
    facts = {
        "latest event": document["event"],
        "waits for": waits,
        "topology": document["topology"],
        "cost": f"{_money(document['cost_usd'])}, {_money(document['held_usd'])} reserved",
        "tokens": run_words.tokens(document["usage"]),
        "error": document["error"],
    }
    for name, value in facts.items():
        if value is not None:
            yield Text.assemble((f"{name}: ", "dim"), clean(str(value)))
    for proposal in document["proposals"]:
        line = f"plan {proposal['number']}  {_words(proposal['state'])}"
        if proposal["reasons"]:
            line += f": {clean('; '.join(proposal['reasons']))}"
        yield Text(line)
    for step in document["steps"]:
        calls = [f"{clean(call['worker'])} {call['outcome'] or 'goes on'}" for call in step["calls"]]
        line = f"step {step['n']}  {clean(step['worker'])}  {_words(step['state'])}  {', '.join(calls)}"
        if step["error"]:
            line += f"  {clean(step['error'])}"
        yield Text(line.rstrip())


def heading(document: Document) -> Text:
    """Return the run, its state, and the instant that is shown."""
    line = Text(document["run"], style="bold")
    line.append(f"  {_words(document['state'])}")
    if document["seq"] == document["last_seq"]:
        return line.append(f"  after {duration(document['length_seconds'])}")
    when = duration(document["seconds"])
    return line.append(f"  at event {document['seq']} of {document['last_seq']}, {when} after its admission")


def _name(node: str) -> str:
    return node.replace(":", " ")


def _words(state: str) -> str:
    return state.replace("_", " ")


def _money(usd: float) -> str:
    return dollars(usd * MILLION)
