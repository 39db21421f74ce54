"""The planner of the rehearsal conductor: it reads the prompt, finds the family, and chooses by the cards.

Easy questions get one step. Hard ones get plan, solve and check, or two independent solvers and a judge, as far as the
step limit allows. Questions like those of world 2 get the plan that a learned policy holds for best (`policy.py`).
What it emits is a plan as `core/plan/proposals.py` defines it; it knows the workers by ordinal only. Shown
the answer of a round it sees most faults there are, as its mind is made, and has a faulty answer solved anew and
compared.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from app.core.message.chat import Message
from app.core.sampling import draw
from app.providers.rehearsal import policy
from app.providers.rehearsal.answering import find_final_answer
from app.providers.rehearsal.question_families import solve
from app.providers.rehearsal.solved_question import SolvedQuestion, plain

QUESTION = re.compile(r"<question>\n?(.*)\n?</question>", re.DOTALL)
WORKER = re.compile(r"^Worker (\d+):\s*(.*)$", re.MULTILINE)
STRENGTHS = re.compile(r"strengths:\s*([^;\n]*)", re.IGNORECASE)
PRICES = re.compile(r"\$(?P<input>[\d.e-]+) in, \$(?P<output>[\d.e-]+) out")
BUDGET = re.compile(r"Budget left: \$([\d.]+)\.")
LEFT_OUT = re.compile(r"\[(\d{1,9}) characters are left out here")
TURN = re.compile(r"(?:\A|\n\n)(system|developer|user|assistant|tool): ")
PREVIOUS = re.compile(r"with the mark (=== [0-9a-f]{16} ===)\..*?^\1\n(.*)\n\1$", re.DOTALL | re.MULTILINE)
SHARPNESS, EYE = 1.5, 0.8
"""The inverse temperature of its choice of workers, and the probability that it recognises a wrong answer."""
DEBATED = frozenset({"words", "extraction", "number theory", "unit conversion"})
"""Families in which two independent answers help more than a plan."""

SOLVE = "Solve the task. Give the complete final answer."
PLAN = "Work out a plan for the task. Do not solve it yet."
FOLLOW = "Solve the task by following the plan. Give the complete final answer."
CHECK = (
    "Check the answer against the task, correct it if it is wrong, and give the complete final answer and nothing else."
)
JUDGE = "Two experts answered independently. Weigh their answers and give one complete final answer and nothing else."


WHY = "Its card suits this subtask best."
SHAPE = "The task seems to need this many steps."
"""The reasons that the simulated conductor gives where it is asked for them."""


class Choice(Struct, frozen=True):
    """A step of the plan, with the probability of each worker for it."""

    worker: int
    subtask: str
    access: tuple[str | int, ...]
    odds: Mapping[int, float]


def is_plan_schema(schema: Mapping[str, Any] | None) -> bool:
    """Return True if a schema asks for a plan."""
    return bool(schema) and "steps" in (schema or {}).get("properties", {})


def plan(messages: Sequence[Message], schema: Mapping[str, Any] | None) -> list[Choice] | None:
    """Return the plan for the question of this prompt, in a further round perhaps the empty one; None if the prompt
    shows no worker."""
    text = "\n".join(message.text for message in messages)
    previous = PREVIOUS.search(messages[2].text) if len(messages) > 2 else None
    block = QUESTION.search(text if previous is None else messages[1].text)
    instructions = text
    question = ""
    if block is not None:
        instructions = instructions.replace(block.group(), "")
        question = block.group(1)
    if previous is not None:
        instructions = instructions.replace(previous.group(), "")
    cards = {int(ordinal): card for ordinal, card in WORKER.findall(instructions)}
    if not cards:
        return None
    limit = _limit(instructions, schema)
    question = _question(question)
    familiarity = policy.familiarity(question)
    solved = solve(question) if familiarity < policy.SURE else None
    if previous is not None:
        return _another_round(solved, previous.group(2), cards, limit)
    if solved is None and familiarity >= policy.LIKELY:
        learned = _plan_by_policy(question, cards, limit, instructions)
        if learned:
            return learned
    return _steps(solved, cards, limit)


def to_text(choices: Sequence[Choice], schema: Mapping[str, Any] | None) -> str:
    """Return the plan as JSON, with all fields that the schema wants; only the step that answers may call tools."""
    extra_fields: dict[str, Any] = {}
    if '"tools"' in json.dumps(schema):
        extra_fields["tools"] = False
    has_reasons = "shape" in (schema or {}).get("properties", {})
    if has_reasons:
        extra_fields |= {"why": WHY, "withheld": ""}
    steps: list[dict[str, Any]] = []
    for choice in choices:
        steps.append(
            {"worker": choice.worker, "subtask": choice.subtask, "access": list(choice.access), **extra_fields}
        )
    plan: dict[str, Any] = {"steps": steps}
    if has_reasons:
        plan["shape"] = SHAPE
    return json.dumps(plan)


def _plan_by_policy(question: str, cards: Mapping[int, str], limit: int, instructions: str) -> list[Choice] | None:
    """Return the plan of the learned policy; None if it has none for these cards and limits."""
    size = len(question) + sum([int(count) for count in LEFT_OUT.findall(question)])
    money = BUDGET.search(instructions)
    priced = []
    for ordinal, card in cards.items():
        strengths, price = STRENGTHS.search(card), PRICES.search(card)
        if strengths and price:
            rates = float(price["input"]) / 1e6, float(price["output"]) / 1e6
            priced.append(policy.Card(ordinal, strengths.group(1).strip(), *rates))
    usd = float(money.group(1)) if money else math.inf
    steps = policy.best(policy.read(question, size), priced, limit, usd)
    if steps is None:
        return None
    return [Choice(ordinal, step.subtask, step.access, {ordinal: 1.0}) for ordinal, step in steps]


def _another_round(solved: SolvedQuestion | None, answer: str, cards: Mapping[int, str], limit: int) -> list[Choice]:
    """Return nothing if no fault is seen in the answer, else another opinion, weighed against it."""
    stated = find_final_answer(answer) or answer
    if solved is None or plain(stated) == plain(solved.answer):
        return []
    if draw(f"eye|{solved.family}|{solved.answer}|{plain(stated)}") >= EYE:
        return []
    solver = _rank(cards, solved.family)
    if limit == 1:
        return [_choice(_rank(cards, "checking"), 0, CHECK, "user", "previous")]
    return [
        _choice(solver, 1, SOLVE, "user"),
        _choice(_rank(cards, "judging", but=_best(solver, 1)), 0, JUDGE, "user", "previous", 0),
    ]


def _steps(solved: SolvedQuestion | None, cards: Mapping[int, str], limit: int) -> list[Choice]:
    if solved is None:
        return [_choice(_rank(cards, "general"), 0, "Answer the user.", "user")]
    solver = _rank(cards, solved.family)
    if not solved.hard or limit < 2:
        return [_choice(solver, 0, SOLVE, "user")]
    checker = _rank(cards, "checking", but=_best(solver, 0))
    if limit == 2:
        return [_choice(solver, 0, SOLVE, "user"), _choice(checker, 0, CHECK, "user", 0)]
    if solved.family in DEBATED:
        return [
            _choice(solver, 0, SOLVE, "user"),
            _choice(solver, 1, SOLVE, "user"),
            _choice(_rank(cards, "judging", but=_best(solver, 0)), 0, JUDGE, "user", 0, 1),
        ]
    return [
        _choice(_rank(cards, "planning"), 0, PLAN, "user"),
        _choice(solver, 0, FOLLOW, "user", 0),
        _choice(checker, 0, CHECK, "user", 1),
    ]


def _rank(cards: Mapping[int, str], strength: str, but: int | None = None) -> dict[int, float]:
    """Return the probability of each worker for a role, by its strengths; best first, ties by ordinal."""
    weights: dict[int, float] = {}
    for ordinal, card in cards.items():
        score = _score(card, strength)
        if ordinal == but:
            score -= 1.0
        weights[ordinal] = math.exp(SHARPNESS * score)
    total = sum(weights.values())
    ordered = sorted(weights, key=lambda ordinal: (-weights[ordinal], ordinal))
    return {ordinal: weights[ordinal] / total for ordinal in ordered}


def _score(card: str, role: str) -> float:
    match = STRENGTHS.search(card)
    strengths: list[str] = []
    if match is not None:
        strengths = [name.strip().lower() for name in match.group(1).split(",")]
    if any(role in strength for strength in strengths):
        return 3.0
    kin = {
        "arithmetic": "math",
        "equations": "math",
        "number theory": "math",
        "checking": "judging",
        "logic": "reasoning",
    }
    if kin.get(role) in strengths:
        return 2.0
    if "general" in strengths or "reasoning" in strengths:
        return 1.0
    return 0.0


def _best(odds: Mapping[int, float], place: int) -> int:
    return list(odds)[min(place, len(odds) - 1)]


def _choice(odds: Mapping[int, float], place: int, subtask: str, *access: str | int) -> Choice:
    return Choice(_best(odds, place), subtask, access, odds)


def _question(block: str) -> str:
    """Return the user's last turn."""
    turns = list(TURN.finditer(block))
    ends = [turn.start() for turn in turns[1:]] + [len(block)]
    question = block
    for turn, end in zip(turns, ends, strict=True):
        if turn.group(1) == "user":
            question = block[turn.end() : end]
    return question


def _limit(instructions: str, schema: Mapping[str, Any] | None) -> int:
    """Return the most steps that the schema, or else the prompt, allows."""
    steps = (schema or {}).get("properties", {}).get("steps", {})
    most = steps.get("maxItems")
    if isinstance(most, int):
        return most
    bound = re.search(r"\b1 to (\d{1,2}) steps", instructions)
    if bound is None:
        return 5
    return int(bound.group(1))
