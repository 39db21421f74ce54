"""The drawings of a run's page, computed from the API's graph and timeline: numbers for SVG, and words for people.

Nothing here is HTML; the templates escape every text.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from app.console.templating import seconds as seconds_words
from app.console.templating import usd
from app.console.templating import worker as worker_name
from app.core.plan.workflow import CONDUCTOR

Data = Mapping[str, Any]
Link = Callable[[str | int | None], str]
"""Gives the address of the page with a step, or with a plan (`plan:0`), in its pane."""
By = Literal["time", "money"]

NODE_WIDTH: Final = 168
NODE_HEIGHT: Final = 58
COLUMN_WIDTH: Final = 236
ROW_HEIGHT: Final = 104
MARGIN: Final = 14
VERTICAL_MARGIN: Final = 46
"""Pixels above the first row and below the last one, for the edges that pass over nodes."""
MIN_PEAK: Final = 12
PEAK_PER_COLUMN: Final = 7
MAX_PEAK: Final = 40
"""Pixels by which an edge passes above or below the nodes of its row: at least, for each column, and at most."""
GUTTER: Final = 16
"""Pixels between a row and the edges that pass beside it."""
MAX_WITHHELD_EDGES: Final = 60
"""Withheld edges that are drawn at once; if there are more, only those of the chosen step are drawn."""
MAX_FAR_EDGES: Final = 40
"""Granted edges between nodes that do not stand side by side which are drawn at once; if there are more, only those of
the chosen node are drawn."""
MAX_LISTED_EDGES: Final = 400
"""Edges of which the table has all; if there are more, it has of the withheld ones only those of the chosen step."""
MAX_CALL_MARKS: Final = 6
"""Calls that have a mark in the node of their step."""
WORKER_CHARS: Final = 20
TICKS: Final[Mapping[By, int]] = {"time": 4, "money": 3}
"""Marks on the axis of a timeline, with both ends: amounts are long words."""
ROW_KINDS: Final = ("run", "round", "planning", "step")
"""The kinds of spans that have a row of their own."""
MIN_WAIT_SECONDS: Final = 0.001
"""Waits of the run that are shorter have no row; they are in the sums."""
PHASE_OF_FAILED_CALL: Final = "of_failed"
"""The state of a phase of a call that has failed: the colour of the call itself says so."""
MIN_BAR_PERCENT: Final = 0.25
"""The least width of a bar, in percent, so that it can be seen."""

DECIDER_TEXTS: Final[Mapping[str, str]] = {
    "conductor": "the conductor's plan",
    "caller": "the caller's own plan",
    "fixed_plan": "the tier's fixed plan",
    "random_plan": "the random plan",
    "selector": "the selector's choice",
    "fallback": "the fallback plan",
    "repeated_plan": "the plan that is repeated",
    "outer_step": "the step around it, which did not see them either",
}
CONTENT_TEXTS: Final[Mapping[str, str]] = {
    "conversation": "the caller's conversation",
    "subtask": "its subtask",
    "output": "the output",
    "task": "the task of the step around it",
    "tool_results": "the results of its tool calls",
    "answer": "the answer of the round before",
}
SPAN_TEXTS: Final[Mapping[str, str]] = {
    "run": "the run",
    "queue": "waits for a slot",
    "round": "round",
    "planning": "planning",
    "people": "waits for an approval",
    "step": "step",
    "retry": "pauses before another call",
    "attempt": "call",
    "first_word": "waits for the first word",
    "stream": "streams",
    "tools": "waits for results of tools",
}


# -- the graph


def draw_graph(graph: Data, pane_id: str, link: Link) -> dict[str, Any]:
    """Return the nodes and edges in pixels. `pane_id` is the id of the node in the pane, or empty."""
    nodes = {node["id"]: node for node in graph["nodes"]}
    withheld: list[Data] = []
    near: list[Data] = []
    far: list[Data] = []
    for edge in graph["edges"]:
        if edge["kind"] == "withheld":
            withheld.append(edge)
        elif _columns_between(edge, nodes) <= 1:
            near.append(edge)
        elif not _is_obvious_subtask(edge, nodes):
            far.append(edge)
    visible_withheld = withheld
    if len(withheld) > MAX_WITHHELD_EDGES:
        visible_withheld = [edge for edge in withheld if edge["target"] == pane_id]
    visible_far = far
    if len(far) > MAX_FAR_EDGES:
        visible_far = [edge for edge in far if pane_id in (edge["source"], edge["target"])]
    rows = [edge for edge in graph["edges"] if edge["what"] != "subtask"]
    table_edges = rows
    if len(rows) > MAX_LISTED_EDGES:
        table_edges = [edge for edge in rows if edge["kind"] == "granted" or edge["target"] == pane_id]
    return {
        "width": (graph["columns"] - 1) * COLUMN_WIDTH + NODE_WIDTH + 2 * MARGIN,
        "height": (graph["rows"] - 1) * ROW_HEIGHT + NODE_HEIGHT + 2 * VERTICAL_MARGIN,
        "nodes": [_node(node, pane_id, link) for node in graph["nodes"]],
        "edges": [_edge(edge, nodes) for edge in (*near, *visible_far, *visible_withheld)],
        "list": [_edge(edge, nodes) for edge in table_edges],
        "rows": len(rows),
        "withheld": len(withheld),
        "not_drawn": len(withheld) - len(visible_withheld),
        "far_not_drawn": len(far) - len(visible_far),
    }


def _is_obvious_subtask(edge: Data, nodes: Mapping[str, Data]) -> bool:
    """Return True for the subtask of a step that stands away from its plan: it is clear that it has one."""
    return edge["what"] == "subtask" and _columns_between(edge, nodes) > 1


def _columns_between(edge: Data, nodes: Mapping[str, Data]) -> int:
    """Return the number of columns from the source of an edge to its target."""
    columns: int = nodes[edge["target"]]["x"] - nodes[edge["source"]]["x"]
    return columns


def _node(node: Data, pane_id: str, link: Link) -> dict[str, Any]:
    x, y = _corner(node)
    worker = worker_name(node["worker"] or node["planned_worker"] or "")
    name = name_of(node["id"])
    figures = ""
    if node["attempts"]:
        figures = f"{call_count(len(node['attempts']))}, {usd(node['cost_usd'])}"
    links = {"step": node["number"], "plan": node["id"]}
    subtask = node.get("subtask")
    words = None
    if subtask:
        words = subtask.get("text")
    return {
        "id": node["id"],
        "x": x,
        "y": y,
        "name": name,
        "worker": _shorten(worker),
        "state": node["state"],
        "figures": figures,
        "href": link(links.get(node["kind"])),
        "attempts": _marks(node["attempts"], x, y),
        "chosen": node["id"] == pane_id,
        "replaced": node["replaced"],
        "answers": node["answers"],
        "kind": node["kind"],
        "title": _title(name, node, worker),
        "words": words,
    }


def call_count(number: int) -> str:
    """Return a number of calls in words."""
    if number == 1:
        return "1 call"
    return f"{number} calls"


def _title(name: str, node: Data, worker: str) -> str:
    planned_worker = node["planned_worker"]
    instead = ""
    if planned_worker and planned_worker not in (node["worker"], CONDUCTOR):
        instead = f" in place of {planned_worker}"
    if worker:
        return f"{name}, {worker}{instead}"
    return name


def _marks(attempts: Sequence[Data], x: int, y: int) -> list[dict[str, Any]]:
    """Return a mark for each of a node's latest calls, from the right; their number is among the figures."""
    marks = []
    for place, attempt in enumerate(reversed(attempts[-MAX_CALL_MARKS:])):
        outcome = attempt["outcome"] or "goes on"
        title = f"{attempt['worker']}: {outcome}"
        if attempt["error"]:
            title += f" ({attempt['error']})"
        marks.append({"x": x + NODE_WIDTH - 12 - 11 * place, "y": y + 47, "outcome": outcome, "title": title})
    return marks


def _corner(node: Data) -> tuple[int, int]:
    return MARGIN + node["x"] * COLUMN_WIDTH, VERTICAL_MARGIN + node["y"] * ROW_HEIGHT


def _edge(edge: Data, nodes: Mapping[str, Data]) -> dict[str, Any]:
    source, target = name_of(edge["source"]), name_of(edge["target"])
    content, why = CONTENT_TEXTS[edge["what"]], reason(edge)
    css_class = f"edge {edge['kind']}"
    if edge["sent"]:
        css_class += " sent"
    return {
        "path": _path(nodes[edge["source"]], nodes[edge["target"]], is_withheld=edge["kind"] == "withheld"),
        "class": css_class,
        "words": f"{source} to {target}, {content}: {edge['kind']}. {why}",
        "kind": edge["kind"],
        "source": source,
        "target": target,
        "target_id": edge["target"],
        "what": content,
        "why": why,
    }


def _path(source: Data, target: Data, *, is_withheld: bool) -> str:
    """Return a curve from the right side of a node to the left side of a later one. Where nodes may stand between two
    of one row it passes above them, or below if the words were withheld; between those of two rows it passes beside the
    row of the later one. Between nodes of one column it passes on their left."""
    (x1, y1), (x2, y2) = _corner(source), _corner(target)
    columns = target["x"] - source["x"]
    if columns > 1 and y1 == y2:
        return _curve_over_row(x1 + NODE_WIDTH - 24, x2 + 24, y1, columns, is_withheld=is_withheld)
    offset = -5
    gutter = y2 + NODE_HEIGHT + GUTTER
    if y2 > y1:
        gutter = y2 - GUTTER
    if is_withheld:
        offset = 5
    y1, y2 = y1 + NODE_HEIGHT // 2 + offset, y2 + NODE_HEIGHT // 2 + offset
    if columns > 1:
        lane = -4
        if is_withheld:
            lane = 4
        return _curve_through_gutter(x1 + NODE_WIDTH, y1, x2, y2, gutter + lane)
    if columns > 0:
        x1 += NODE_WIDTH
        bend = max((x2 - x1) // 2, 24)
        return f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"
    return f"M{x1} {y1}C{x1 - 44} {y1} {x2 - 44} {y2} {x2} {y2}"


def _curve_over_row(x1: int, x2: int, y: int, columns: int, *, is_withheld: bool) -> str:
    """Return a curve that passes above the nodes of its row, or below them if the words were withheld."""
    height = min(MIN_PEAK + PEAK_PER_COLUMN * columns, MAX_PEAK) * 4 // 3  # a curve has its peak at three quarters
    peak = y - height
    if is_withheld:
        y += NODE_HEIGHT
        peak = y + height
    return f"M{x1} {y}C{x1 + 40} {peak} {x2 - 40} {peak} {x2} {y}"


def _curve_through_gutter(x1: int, y1: int, x2: int, y2: int, gutter: int) -> str:
    """Return a curve that turns behind its first node to the height of a gutter between two rows, and into the last
    node."""
    gap = COLUMN_WIDTH - NODE_WIDTH
    left, right = x1 + gap, x2 - gap
    into = f"C{x1 + gap // 2} {y1} {x1 + gap // 2} {gutter} {left} {gutter}"
    out = f"C{x2 - gap // 2} {gutter} {x2 - gap // 2} {y2} {x2} {y2}"
    return f"M{x1} {y1}{into}L{right} {gutter}{out}"


def reason(edge: Data) -> str:
    """Return a sentence that says why words were granted or withheld."""
    if edge["kind"] == "granted":
        if edge["sent"]:
            return "A call contained it."
        return "It is on the access list; no call has contained it."
    if edge["reason"] == "policy":
        who = "a rule"
        if edge["by"] == "clearance":
            who = "clearance"
        return f"{edge['worker']} may not read it, by {who}: {edge['detail']}."
    if edge["reason"] == "no_output":
        cause = ""
        if edge["detail"]:
            cause = f" ({edge['detail']})"
        return f"It is on the access list, but the step ended without words: {edge['by']}{cause}."
    return f"It is not on the access list, by {DECIDER_TEXTS.get(edge['by'], edge['by'])}."


def name_of(node: str) -> str:
    """Return the name of a node for people."""
    kind, _, number = node.partition(":")
    if kind == "caller":
        return "caller"
    return f"{kind} {number}"


def _shorten(text: str) -> str:
    if len(text) <= WORKER_CHARS:
        return text
    return f"{text[: WORKER_CHARS - 1]}…"


# -- the timeline


def draw_timeline(timeline: Data, length: float, by: By, pane_id: str, link: Link) -> dict[str, Any]:
    """Return a row for each plan, step and wait of the run, with bars in percent of the axis: of `length` seconds, or
    of the run's money."""
    whole = length
    if by == "money":
        whole = timeline["cost_usd"]
    spans = {span["id"]: span for span in timeline["spans"]}
    rows: dict[str, dict[str, Any]] = {}
    for span in timeline["spans"]:
        home = _row_of(span, spans)
        if home["id"] not in rows:
            rows[home["id"]] = _row(home, pane_id, link)
        bar = _bar(span, spans.get(span["parent"]), whole, by)
        if bar is not None:
            rows[home["id"]]["bars"].append(bar)
    now = None
    if length and by == "time":
        now = round(min(100 * timeline["seconds"] / length, 100), 3)
    totals = []
    for kind, total in timeline["totals"].items():
        if kind != "run":
            totals.append({"name": SPAN_TEXTS[kind], **total})
    return {
        "by": by,
        "rows": [row for row in rows.values() if row["bars"] and row["seconds"] >= row["least"]],
        "ticks": _ticks(whole, TICKS[by] - 1),
        "now": now,
        "totals": totals,
        "whole": whole,
    }


def _ticks(whole: float, last: int) -> list[dict[str, float]]:
    """Return the marks of an axis from 0 to `whole`, numbered from 0 to `last`; none for an axis without a length."""
    if not whole:
        return []
    ticks: list[dict[str, float]] = []
    for n in range(last + 1):
        ticks.append({"at": round(100 * n / last, 2), "value": whole * n / last})
    return ticks


def _row_of(span: Data, spans: Mapping[str, Data]) -> Data:
    """Return the span in whose row this one is drawn: its plan or step, else itself."""
    home = span
    while home["kind"] not in ROW_KINDS and home["parent"] is not None:
        if home["kind"] in ("queue", "people") and spans[home["parent"]]["kind"] in ("run", "round"):
            return home
        home = spans[home["parent"]]
    return home


def _row(span: Data, pane_id: str, link: Link) -> dict[str, Any]:
    """Return the row of a span, still without bars. The rows of plans and of steps lead to their nodes."""
    kind = span["kind"]
    name = SPAN_TEXTS[kind]
    least = MIN_WAIT_SECONDS
    if kind in ROW_KINDS:
        least = 0.0
    node: str | None = None
    href: str | None = None
    worker: str | None = None
    if kind == "round":
        name = f"round {span['round']}"
    elif kind == "planning":
        name = f"plan {span['proposal']}"
        node = f"plan:{span['proposal']}"
        href = link(node)
    elif kind == "step":
        name = f"step {span['step']}"
        node = f"step:{span['step']}"
        href = link(span["step"])
        worker = span["worker"]
    return {
        "id": span["id"],
        "name": name,
        "worker": worker,
        "state": span["state"],
        "depth": min(span["depth"], 4),
        "href": href,
        "chosen": node == pane_id,
        "seconds": span["seconds"],
        "cost_usd": span["cost_usd"],
        "least": least,
        "bars": [],
    }


def _bar(span: Data, parent: Data | None, whole: float, by: By) -> dict[str, Any] | None:
    """Return the bar of a span in its parent; None where it has no place on the axis."""
    start, size = span["start"], span["seconds"]
    if by == "money":
        start, size = span["cost_start_usd"], span["cost_usd"]
    if not whole or start is None:
        return None
    if by == "money" and not size:
        return None
    left = min(100 * start / whole, 100 - MIN_BAR_PERCENT)
    state = span["state"] or ""
    if parent is not None and _has_failed(parent):
        state = PHASE_OF_FAILED_CALL
    css_class = f"bar {span['kind']} {state}"
    if span["end"] is None:
        css_class += " open"
    y, height = 6, 8
    if span["kind"] in ROW_KINDS:
        y, height = 3, 14
    return {
        "class": css_class,
        "x": round(left, 3),
        "width": round(max(min(100 * size / whole, 100 - left), MIN_BAR_PERCENT), 3),
        "y": y,
        "height": height,
        "words": _bar_words(span),
    }


def _bar_words(span: Data) -> str:
    """Return the description of a bar of the timeline, which browsers show as a tooltip and screen readers read out."""
    words = SPAN_TEXTS[span["kind"]]
    if span["worker"]:
        words += f" of {span['worker']}"
    if span["state"] and span["kind"] in ("attempt", "planning", "step"):
        words += f", {span['state']}"
    if span["error"] and span["kind"] == "attempt":
        words += f" ({span['error']})"
    words += f": {seconds_words(span['seconds'])}"
    if span["cost_usd"]:
        words += f", {usd(span['cost_usd'])}"
    if span["end"] is not None:
        return words
    return f"{words}, goes on"


def _has_failed(span: Data) -> bool:
    return span["kind"] == "attempt" and span["state"] in ("error", "truncated", "unknown")


def instants(timeline: Data) -> list[float]:
    """Return the seconds at which something changed, in order, each once."""
    times = {0.0}
    for span in timeline["spans"]:
        times.add(span["start"])
        if span["end"] is not None:
            times.add(span["end"])
    return sorted(times)


def neighbours(times: Sequence[float], at: float) -> tuple[float | None, float | None]:
    """Return the instants before and after one; `times` are in order."""
    before = None
    for time in times:
        if time > at + 1e-6:
            return before, time
        if time < at - 1e-6:
            before = time
    return before, None
