"""A run as a tree on the terminal, for `baton runs show` and `baton plan`.

Texts of callers and workers are shown without control characters.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import orjson
from rich.text import Text
from rich.tree import Tree

from app.cli.runs import run_words
from app.cli.terminal import clean, duration, excerpt, moment
from app.core.message.chat import task_from_json
from app.core.plan.workflow import CONDUCTOR
from app.core.run.fold import fold
from app.core.run.state import RunState
from app.gateway.runs import audit
from app.store.protocol import RunRow, Store

COLOURS: Mapping[str, str] = {
    "succeeded": "green",
    "done": "green",
    "failed": "red",
    "expired": "red",
    "over_budget": "red",
}


async def read_run(store: Store, row: RunRow) -> tuple[dict[str, Any], str | None]:
    """Return the audit trail's record of a run, with its steps in full and the comments of its ratings, and the
    caller's last message, which is None if it was erased."""
    journal = await store.journal(row.id)
    state = fold(journal.events)
    ratings = await store.feedback(row.id)
    record = audit.render_run(row, journal, ratings)
    record["comments"] = {rating.id: rating.comment for rating in ratings if rating.comment}
    record |= {"rehearsal": state.admitted.rehearsal, "preview": state.admitted.preview}
    record["steps"] = [await audit.step_in_full(store, state, journal.events, n) for n in state.steps]
    return record, await _question(store, state)


async def _question(store: Store, state: RunState) -> str | None:
    bodies = await store.contents(state.run, [state.admitted.task])
    if not bodies:
        return None
    messages = task_from_json(orjson.loads(bodies[state.admitted.task])).messages
    return next((message.text for message in reversed(messages) if message.role == "user"), "")


def draw(run: run_words.Record, question: str | None, *, full: bool) -> Tree:
    """Return the tree of a run. `question` is the caller's last message, or None if it was erased."""
    tree = Tree(_header(run), guide_style="dim")
    for name, value in _facts(run, question, full):
        tree.add(_line(name, value))
    branches: dict[int | None, Tree] = {None: tree}
    _proposals(tree, run, parent=None)
    answer = run["end"].get("step")
    for step in run["steps"]:  # a step comes before the steps that are nested in it
        around = branches[step["parent"]]
        branches[step["n"]] = _step(around, step, answers=step["n"] == answer, full=full, is_preview=run["preview"])
        _proposals(branches[step["n"]], run, parent=step["n"])
    for rating in chain.from_iterable(run["feedback"].values()):
        branch = tree.add(_line("feedback", run_words.rating(rating)))
        if rating["commented"]:
            branch.add(_line("comment", _text_or_excerpt(run["comments"].get(rating["id"]), full)))
    return tree


def _proposals(tree: Tree, run: run_words.Record, parent: int | None) -> None:
    """Add the proposals for the run itself, or for the step in which they are nested."""
    for proposal in run["proposals"]:
        if proposal["parent"] != parent:
            continue
        branch = tree.add(_line(f"proposal {proposal['number']}", run_words.proposal(proposal)))
        for reason in proposal["reasons"]:
            branch.add(_line("rejected", reason))
        for call in proposal["embedding_attempts"]:
            branch.add(_line("embedding call", run_words.attempt(call)))
        for call in proposal["attempts"]:
            branch.add(_line("planning call", run_words.attempt(call)))


def _header(run: run_words.Record) -> Text:
    state = run["state"]
    words = Text(run["id"], style="bold")
    words.append(f"  {state}", style=f"bold {COLOURS.get(state, 'yellow')}")
    words.append(f"  {clean(run['tier'])}")
    if run["model"] != run["tier"]:
        words.append(f" (as {clean(run['model'])})")
    words.append(f", effort {run['effort']}")
    if run["degraded"] and not run["preview"]:
        words.append("  degraded", style="yellow")
    if run["rehearsal"]:
        words.append("  REHEARSAL: simulated workers", style="yellow")
    if run["preview"]:
        words.append("  preview: planned only, nothing executed")
    return words


def _erasure_text(erasure: run_words.Record) -> str:
    """Return when the content was erased, and by what."""
    if erasure["at"] is None:
        return "erased by an earlier release, which noted no time"
    return f"erased {moment(erasure['at'])} ({erasure['by']})"


def _facts(run: run_words.Record, question: str | None, full: bool) -> list[tuple[str, str]]:
    until = "still going"
    if run["ended_at"]:
        until = f"took {duration(run['ended_at'] - run['created_at'])}"
    facts = [
        ("asked", _text_or_excerpt(question, full)),
        ("when", f"{moment(run['created_at'])}, {until}; key {run_words.key(run)}, tenant {run['tenant']}"),
        ("used", f"{run_words.tokens(run['total_usage'])}, {run_words.cost(run['cost_usd'])}"),
    ]
    if run["erasure"]:
        facts.append(("content", _erasure_text(run["erasure"])))
    facts += [
        ("limits", run_words.limits(run)),
        ("labels", ", ".join(run["labels"]) or "none"),
        ("pool", ", ".join(run["pool"])),
    ]
    for worker, reason in run["excluded"].items():
        facts.append(("left out", f"{worker}: {reason}"))
    for words in run_words.why(run):
        facts.append(("why so", words))
    return facts + _list_rare_facts(run)


def _list_rare_facts(run: run_words.Record) -> list[tuple[str, str]]:
    """Return the facts that only some runs have."""
    facts = []
    requests, replies = run_words.requests(run), run_words.replies(run)
    if requests:
        facts.append(("x-request-id", requests))
    if replies:
        facts.append(("replies", replies))
    if run["served_by"] is not None:
        facts.append(("served by", f"the {run['served_by']}, in place of {run['tier']}'s own definition"))
    if run["origin"] is not None:
        facts.append(("follows from", f"{run['origin']['run']} ({run['origin']['kind']})"))
    if run["trace_id"]:
        facts.append(("trace", run["trace_id"]))
    turns = run_words.turns(run)
    if turns is not None:
        facts.append(("turns", turns))
    if run["ignored"]:
        facts.append(("ignored", ", ".join(run["ignored"])))
    if run["error"]:
        facts.append(("error", run["error"]))
    if run["end"].get("fell_back") and not run["end"].get("stopped"):
        facts.append(("answer", "the last step returned nothing, so the last step with an output answers"))
    return facts


def _step(tree: Tree, step: run_words.Record, *, answers: bool, full: bool, is_preview: bool) -> Tree:
    state, error, output = step["state"], run_words.error(step["error"]), None
    if is_preview:
        state, error = "planned", None
    if state == "done":
        output = _text_or_excerpt(step["output"], full)
    title = Text(f"step {step['n']}  ", style="bold")
    if step["round"] > 1:
        title.append(f"of round {step['round']}  ")
    worker = step["worker"]
    if worker == CONDUCTOR:
        worker = run_words.CONDUCTOR_ITSELF
    title.append(clean(worker), style="bold cyan")
    title.append(f"  {state}", style=COLOURS.get(state, "yellow"))
    if answers:
        title.append("  ★ its output is the answer", style="bold green")
    branch = tree.add(title)
    waits = state == "awaiting_tool"
    lines: list[tuple[str, str | None]] = [
        ("sees", run_words.sees(step["access"])),
        ("labels", ", ".join(step.get("labels", ())) or None),
        ("declassified", ", ".join(step.get("declassified", ())) or None),
        ("subtask", _subtask_text(step["subtask"], full)),
        ("chosen", run_words.choice(step)),
        ("kept", run_words.output_origin(step)),
        *[(f"attempt {call['attempt']}", run_words.attempt(call)) for call in step["attempts"]],
        *[("tools", run_words.exchange(tool_use, waits=waits, full=full)) for tool_use in step["exchanges"]],
        ("error", error),
        ("not called", "; ".join(run_words.describe_passed_over_workers(step)) or None),
        ("said", output),
    ]
    for name, value in lines:
        if value is not None:
            branch.add(_line(name, value))
    return branch


def _subtask_text(subtask: str | None, full: bool) -> str:
    if subtask == "":
        return "none: it answers the conversation"
    return _text_or_excerpt(subtask, full)


def _text_or_excerpt(text: str | None, full: bool) -> str:
    if text is None:
        return run_words.ERASED
    if full:
        return clean(text)
    return excerpt(text, run_words.EXCERPT_CHARS)


def _line(name: str, value: Any) -> Text:
    return Text.assemble((f"{name}: ", "dim"), clean(str(value)))
