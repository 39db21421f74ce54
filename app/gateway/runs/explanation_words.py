"""The sentences of a run's explanation, made from its data (`explanation.py`) and from nothing else.

Every figure and every name in the sentences stands in the data. The phrases of this module have no digits, so that a
test can tell an invented figure from one of the data. Texts that a conductor wrote are quoted, on one line and cut to
an excerpt: they are not trusted.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

from app.core.plan.workflow import CONDUCTOR
from app.core.run.kinds import DRIVER_LOST

Data = Mapping[str, Any]
EXCERPT: Final = 300
"""Characters of a reason that are quoted."""
STATES: Final[Mapping[str, str]] = {
    "succeeded": "has its answer",
    "failed": "failed",
    "cancelled": "was cancelled",
    "expired": "ran out of time",
    "over_budget": "ran out of budget",
    "awaiting_tool": "waits for results of the caller's tools",
    "awaiting_approval": "waits for an approval of its plan",
}
DECIDED: Final[Mapping[str, str]] = {
    "conductor": "a model planned it",
    "caller": "the request brought its own plan, and no conductor was asked",
    "fixed_plan": "the tier has a fixed plan, and nothing was weighed for this request",
    "random_plan": "the plan was drawn at random",
    "selector": "the tier's selector chose it by what it has learned from ratings",
    "fallback": "no plan could be used, so the fallback worker answers alone",
    "repeated_plan": "the plan is that of the run which it repeats, or was given for the replay",
}
CHOSEN: Final[Mapping[str, str]] = {
    "conductor": "the conductor's plan",
    "caller": "the caller's plan",
    "fixed_plan": "the tier's fixed plan",
    "random_plan": "the random plan",
    "selector": "the selector's choice",
    "fallback": "the fallback",
    "repeated_plan": "the plan that is repeated",
    "outer_step": "the step around it, which did not see them either",
}
ORIGINS: Final[Mapping[str, str]] = {
    "plan": "It carries out the plan",
    "replay": "It replays",
    "shadow": "It is a shadow of",
}
DECISIONS: Final[Mapping[str | None, str]] = {
    "approved": "It was approved",
    "refused": "It was refused",
    "expired": "Nobody decided in time, so the plan was not used",
    None: "Nobody decided before the run ended",
}
EXCLUDED_BY: Final[Mapping[str, str]] = {
    "clearance": "by its clearance",
    "rule": "by a rule",
    "caller": "by the request",
    "health": "because it fails",
    "budget": "because of a budget",
    "approval": "because the approval does not name it",
    "ability": "by what it can do or may be asked",
}
NO_REASON: Final[Mapping[str, str]] = {
    "none": "the conductor was asked for its reasons and gave none",
    "not_asked": "no reasons were asked for (the tier's conductor has no `reasons = true`)",
    "erased": "the conductor's reason was erased with the run's content",
    "not_shown": "the conductor's reason is content, which this key may not read (it needs audit:read)",
}
UNKNOWN: Final[Mapping[tuple[str, str], str]] = {
    ("probability", "not_reported"): "how probable the choice of its worker was: the conductor's server reports no "
    "probabilities",
    ("prediction", "not_journaled"): "what the selector predicted for each alternative: its journal has probabilities "
    "alone",
    ("cheapest", "no_prices"): "what the cheapest worker would have cost: the pool's prices at that time are not known",
    ("cost", "outcome_lost"): "what a call whose outcome was lost really cost: its hold counts as spent",
    ("cost", "usage_estimated"): "the exact tokens of a call that reported none: they are estimated",
    ("quality", "not_rated"): "whether the answer is right: nobody has rated it",
    ("agreement", "not_compared"): "whether steps that are worded differently agree in substance: only equal texts are "
    "recognised",
    ("workers_reasons", "not_observable"): "why a worker wrote what it wrote: the journal has its words and not its "
    "reasons",
}
ABOUT: Final[Mapping[str, str]] = {"shape": "why the plan has this shape", "worker": "why this worker was chosen"}


def text(data: Data) -> str:
    """Return the explanation in words, one line for each statement; steps and lists are indented."""
    lines = [_opening(data), *_shape(data["shape"]), *_pool(data)]
    for approval in data["approvals"]:
        lines += _approval(approval, is_waiting=data["state"] == "awaiting_approval")
    for step in data["steps"]:
        lines += _step(step, preview=data["preview"])
    lines += _cost(data["cost"])
    lines += _answer(data)
    lines += _describe_gaps(data["unknown"])
    return "\n".join(lines)


def quote(text: str) -> str:
    """Return a text that is not trusted, on one line, without control characters, cut to an excerpt."""
    printable = "".join(" " if unicodedata.category(mark)[0] in "CZ" else mark for mark in text)
    line = " ".join(printable.split())
    if len(line) > EXCERPT:
        line = line[: EXCERPT - 1] + "…"
    return f'"{line}"'


def money(usd: float) -> str:
    """Return dollars with as many digits as the figure has."""
    digits = f"{usd:.6f}".rstrip("0").rstrip(".")
    return f"${digits}"


def figure(number: float) -> str:
    """Return a probability or another number as the data has it."""
    if abs(number) >= 0.0001 or not number:
        return f"{number:g}"
    return f"{number}"


def _step_list(numbers: Sequence[int]) -> str:
    noun = "steps"
    if len(numbers) == 1:
        noun = "step"
    return f"{noun} " + ", ".join(map(str, numbers))


def _count_of(number: int, noun: str, many: str) -> str:
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {many}"


def _opening(data: Data) -> str:
    state = STATES.get(data["state"], f"is {data['state']}")
    if data["preview"] and data["state"] == "succeeded":
        state = "was planned and not executed"
    sentences = [f"{data['run']} of {data['tier']} {state}."]
    if data["served_by"] is not None:
        sentences.append(f"It was served by the {data['served_by']}, which an operator has put in the tier's place.")
    if data["rehearsal"]:
        sentences.append("Its workers are simulated.")
    if data["origin"] is not None:
        kind = data["origin"]["kind"]
        sentences.append(f"{ORIGINS.get(kind, kind)} {data['origin']['run']}.")
    return " ".join(sentences)


# -- the shape


def _shape(shape: Data) -> list[str]:
    if shape["decided_by"] is None:
        return ["No plan was asked for."]
    topology = shape["topology"] or "no topology"
    form = f"{topology}, {_count_of(shape['step_count'], 'step', 'steps')}"
    if shape["rounds"] > 1:
        form += f" in {shape['rounds']} rounds"
    why = DECIDED.get(shape["decided_by"], shape["decided_by"])
    if shape["conductor"]:
        why += f" ({shape['conductor']}{_version(shape)})"
    lines = [f"Shape: {form}. Why: {why}."]
    if shape["reason"]["text"] is not None:
        lines.append(f"  The conductor's reason for the shape, in its own words: {quote(shape['reason']['text'])}")
    for proposal in shape["proposals"]:
        lines += _describe_rejection(proposal)
    if shape["choice"] is not None:
        return lines + _choice(shape["choice"])
    return lines


def _version(shape: Data) -> str:
    if shape["version"]:
        return f", version {quote(shape['version'])}"
    return ""


def _describe_rejection(proposal: Data) -> list[str]:
    if proposal["state"] != "rejected":
        return []
    failure = "it was rejected"
    if proposal["rejected_because"] == [DRIVER_LOST]:
        failure = "the engine was lost"
    elif proposal["outage"]:
        failure = "the conductor failed"
    reasons = "; ".join(map(quote, proposal["rejected_because"]))
    return [f"  Proposal {proposal['number']} was not used, because {failure}: {reasons}."]


def _choice(choice: Data) -> list[str]:
    purpose = "as the best"
    if choice["explored"]:
        purpose = "to explore"
    if not choice["explores"]:
        purpose += ", because exploring was not allowed"
    candidates = _count_of(choice["candidates"], "candidate", "candidates")
    share = f"probability {figure(choice['probability'])} among {candidates}"
    lines = [f"  The selector chose {quote(choice['action'])} with {share}, {purpose}."]
    for alternative in choice["alternatives"]:
        lines += _alternative(alternative, is_chosen=alternative["action"] == choice["action"])
    left_out = ", ".join(quote(arm["action"]) for arm in choice["left_out"])
    if left_out:
        lines.append(f"    Left out because the run could not bear them: {left_out}.")
    return lines


def _alternative(alternative: Data, *, is_chosen: bool) -> list[str]:
    """Return what is known of an alternative; nothing for the chosen one if nothing was predicted for it."""
    subject = f"Alternative {quote(alternative['action'])}"
    if is_chosen:
        subject = "It"
    words = f"    {subject}: probability {figure(alternative['probability'])}"
    if alternative["success"] is not None:
        success, cost = figure(alternative["success"]), money(alternative["cost_usd"])
        return [f"{words}, predicted success {success}, predicted cost {cost}."]
    if is_chosen:
        return []
    return [f"{words}."]


# -- the workers


def _pool(data: Data) -> list[str]:
    lines = [f"Workers that could be chosen: {', '.join(map(_worker, data['pool']))}."]
    for worker in data["excluded"]:
        when = ""
        if worker["proposal"] is not None:
            when = f" from proposal {worker['proposal']}"
        lines.append(f"  {worker['worker']} was left out{when} {EXCLUDED_BY[worker['by']]}: {worker['reason']}.")
    return lines


def _approval(approval: Data, *, is_waiting: bool) -> list[str]:
    causes = "; ".join(map(quote, approval["needed_because"]))
    if approval["worst_case_usd"] is not None:
        causes += f"; its worst case costs {money(approval['worst_case_usd'])}"
    lines = [f"Approval: proposal {approval['proposal']} needed one, because of {causes}."]
    decision = DECISIONS[approval["decision"]]
    if is_waiting and approval["decision"] is None:
        decision = "Nobody has decided yet"
    if approval["by"] is not None:
        decision += f" by {approval['by']}"
    if approval["max_usd"] is not None:
        decision += f", for at most {money(approval['max_usd'])}"
    lines.append(f"  {decision}.")
    if approval["reason"]["text"] is not None:
        lines.append(f"  The reason that was given: {quote(approval['reason']['text'])}")
    return lines


def _worker(worker: Data) -> str:
    facts = [*worker["strengths"]]
    if worker["input_usd"] is not None:
        facts.append(f"{money(worker['input_usd'])} in and {money(worker['output_usd'])} out for a million tokens")
    if facts:
        return f"{worker['worker']} ({', '.join(facts)})"
    return str(worker["worker"])


def _step(step: Data, *, preview: bool) -> list[str]:
    place = f"Step {step['n']}"
    if step["parent"] is not None:
        place += f", inside step {step['parent']}"
    if step["round"] > 1:
        place += f", round {step['round']}"
    who = _name(step["worker"])
    if step["nested"]:
        who += ", with a workflow of its own"
    state = step["state"]
    if preview:
        state = "planned"
    if step["error"] and not preview:
        state += f" ({step['error']})"
    lines = [
        f"{place}: {who}, {state}.",
        f"  Chosen by {CHOSEN.get(step['chosen_by'], step['chosen_by'])}{_odds(step)}.",
    ]
    if step["reason"]["text"] is not None:
        lines.append(f"  The conductor's reason, in its own words: {quote(step['reason']['text'])}")
    lines += _sight(step, preview=preview)
    lines += _calls(step)
    for worker in step["not_called"]:
        lines.append(f"  {worker['worker']} was not called {EXCLUDED_BY[worker['by']]}: {worker['reason']}.")
    return lines


def _sight(step: Data, *, preview: bool) -> list[str]:
    """Return what the step's worker saw, and what was kept from it."""
    lines: list[str] = []
    if step["kept_from"] is not None:
        source = step["kept_from"]
        lines.append(f"  Nobody was called for it: its output is that of step {source['step']} of {source['run']}.")
    verb = "would see"
    if step["has_begun"]:
        verb = "saw"
    elif step["state"] in ("failed", "skipped") and not preview:
        verb = "would have seen"
    saw, withheld = step["saw"], step["withheld"]
    lines.append(f"  It {verb} {_describe_seen(saw)}.{_describe_withheld(withheld)}")
    if saw["unseen"]:
        lines.append(f"  Nothing was shown of {_step_list(saw['unseen'])}, which ended without an output.")
    if withheld["reason"]["text"] is not None:
        lines.append(f"  The reason for withholding, in its own words: {quote(withheld['reason']['text'])}")
    return lines


def _odds(step: Data) -> str:
    if step["probability"] is None:
        return ""
    return f", which gave {_name(step['planned_worker'])} the probability {figure(step['probability'])}"


def _name(worker: str) -> str:
    if worker == CONDUCTOR:
        return "the conductor itself"
    return worker


def _describe_seen(saw: Data) -> str:
    parts: list[str] = []
    if saw["user"]:
        parts.append("the caller's conversation")
    if saw["task_of"] is not None:
        parts.append(f"the task of step {saw['task_of']}")
    if saw["steps"]:
        parts.append(f"the output of {_step_list(saw['steps'])}")
    if saw["tool_results"]:
        parts.append(f"the results of its own tool calls ({_count_of(saw['tool_results'], 'time', 'times')})")
    return " and ".join(parts) or "nothing but its subtask"


def _describe_withheld(withheld: Data) -> str:
    parts: list[str] = []
    if withheld["user"]:
        parts.append("the caller's words")
    if withheld["steps"]:
        parts.append(f"the output of {_step_list(withheld['steps'])}")
    if not parts:
        return " Nothing was withheld."
    return f" Withheld: {' and '.join(parts)}, by {CHOSEN.get(withheld['by'], withheld['by'])}."


def _calls(step: Data) -> list[str]:
    lines = []
    if step["call_count"] > 1 or step["failed_calls"]:
        calls = _count_of(step["call_count"], "call", "calls")
        if step["failed_calls"]:
            calls += f", of which {step['failed_calls']} without success"
        lines.append(f"  It took {calls}:")
        lines += [f"    {_call(call)}" for call in step["calls"]]
    if step["replaced"] and not step["nested"]:
        lines.append(f"  {step['worker']} took over from {step['planned_worker']}, for which the step was planned.")
    return lines


def _call(call: Data) -> str:
    words = f"{call['worker']}: {call['outcome'] or 'has no outcome yet'}"
    causes = ": ".join(str(call[name]) for name in ("error", "reason") if call[name])
    if causes:
        words += f" ({causes})"
    if call["cost_usd"] is not None:
        words += f", {money(call['cost_usd'])}"
    if call["despite"]:
        words += f", called although it was ejected ({call['despite']})"
    return f"{words}."


# -- money and the answer


def _cost(cost: Data) -> list[str]:
    if not cost["call_count"]:
        return ["Cost: nothing, because no call was made."]
    parts = f"{money(cost['planning_usd'])} for planning and {money(cost['steps_usd'])} for the steps"
    lines = [f"Cost: {money(cost['cost_usd'])} for {_count_of(cost['call_count'], 'call', 'calls')}: {parts}."]
    if cost["cheapest_usd"] is not None:
        difference = "no more and no less"
        if cost["difference_usd"]:
            direction = "more" if cost["dearer"] else "less"
            difference = f"{money(cost['difference_usd'])} {direction} than that"
        cheapest = f"{money(cost['cheapest_usd'])} with {cost['cheapest_worker']}, the cheapest worker for them"
        lines.append(f"  The same calls of the steps would have cost {cheapest}; the run paid {difference}.")
    return lines


def _answer(data: Data) -> list[str]:
    answer = data["answer"]
    if answer["step"] is None:
        if answer["error"]:
            return [f"Answer: none ({answer['error']})."]
        return []
    who = _name(answer["worker"])
    latest_round = max([proposal["round"] for proposal in data["shape"]["proposals"]])
    lines = _describe_support(answer) + _describe_doubts(answer, latest_round) + [*map(_rating, answer["ratings"])]
    return [
        f"What speaks for the answer, which is the output of step {answer['step']} ({who}):",
        *[f"  {line}" for line in lines],
    ]


def _describe_support(answer: Data) -> list[str]:
    lines: list[str] = []
    if answer["finish"] == "stop":
        lines.append("Its worker ended it by itself.")
    if answer["rests_on"]:
        lines.append(f"It was written with the output of {_step_list(answer['rests_on'])} in view.")
    if answer["same_text"]:
        lines.append(f"Word for word the same text came from {_step_list(answer['same_text'])}.")
    if answer["accepted_in_round"] is not None:
        lines.append(f"The conductor was shown it in round {answer['accepted_in_round']} and accepted it.")
    if not lines:
        lines.append("Nothing but that its worker gave it.")
    return lines


def _describe_doubts(answer: Data, latest_round: int) -> list[str]:
    lines: list[str] = []
    is_cut_short = bool(answer["stopped"]) and latest_round == 1
    if answer["finish"] not in ("stop", None, ""):
        lines.append(f"Against it: it ended by {answer['finish']}.")
    if answer["refusal"]:
        lines.append("Against it: the worker refused to answer.")
    if answer["form_repairs"]:
        lines.append(
            f"Against it: {_count_of(answer['form_repairs'], 'answer', 'answers')} lacked the form that was asked for."
        )
    if answer["fell_back"] and not is_cut_short:
        lines.append("Against it: the last step returned nothing, so an earlier one answers.")
    if is_cut_short:
        end = f"the plan could not be carried out to its end ({answer['stopped']})"
        lines.append(f"Against it: {end}, and this was the best output until then.")
    elif answer["stopped"]:
        lines.append(f"Against it: a further round was begun, and it has no answer ({answer['stopped']}).")
    elif answer["degraded"]:
        lines.append(
            "Against it: a fallback decided, a step that others needed was lost, or a text was cut off because the "
            "time was over."
        )
    return lines


def _rating(rating: Data) -> str:
    value = "no score"
    if rating["score"] is not None:
        value = f"{figure(rating['score'])} of a full score"
    if rating["label"]:
        value += f", {quote(rating['label'])}"
    return f"A rating ({rating['kind']}, by {quote(rating['source'])}): {value}."


def _describe_gaps(gaps: Sequence[Data]) -> list[str]:
    if not gaps:
        return []
    steps_by_words: dict[str, list[int]] = {}
    for gap in gaps:
        words = UNKNOWN.get((gap["about"], gap["cause"]))
        if words is None:
            words = f"{ABOUT[gap['about']]}: {NO_REASON[gap['cause']]}"
        steps = steps_by_words.setdefault(words, [])
        if gap["step"] is not None:
            steps.append(gap["step"])
    lines = ["What nobody knows:"]
    for words, steps in steps_by_words.items():
        if steps:
            words = f"Of {_step_list(steps)}: {words}"
        lines.append(f"  {words}.")
    return lines
