"""World 2 as the executor meets it: workers that read messages and answer, each call with dice of its own.

A worker knows only its messages. It finds the task in the caller's words or, where those are withheld, by the digest
that quotes it. A document may follow the task after `DOCUMENT`; who it is that reads it changes nothing but the tokens.
A digest may lack something, a plan may name the wrong kinds of work, and an answer names the workers who had a hand in
it. The hidden trait of a task is in no text: workers look it up in a `Library` of posed tasks. What a subtask asks for
is read from its words, so that any conductor can write one.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from app.core.message.chat import Message, Text
from app.core.message.chat import Task as Request
from app.core.run.visibility import EarlierStep, compose, visible_steps
from app.lab.workers import STEP, SUBTASK
from app.lab.world2.constants import DOCUMENT_TOKENS, DOMAINS, TRAITS, constants
from app.lab.world2.rules import LANGUAGE, PARTIAL, combine_logit, output_tokens, size_of, tokens_passed_on
from app.lab.world2.shapes import SUBTASKS, Plan, workflow
from app.lab.world2.tasks import SEPARATOR, Task
from app.lab.world2.workers import Pool, Worker, logistic

CANNOT_KNOW = "I was not shown what this needs, so I cannot know."
RESULTS = re.compile(
    r"Worked out by (?P<hands>[a-z, ]+)\. (?P<part>first part:|second part:|The answer is) (?P<text>.*)", re.DOTALL
)
WHOLE = "The answer is"
PLAN = re.compile(r"Plan: (?P<kinds>[a-z, ]+)\.")
DOCUMENT = "\n\n<document>\n"
"""The line between a task and the document that comes with it."""
ROLES = (
    ("digest", re.compile(r"\b(digest|summar|condense)", re.IGNORECASE)),
    ("plan", re.compile(r"(?=.*\b(plan|outline|work out how)\b).*\bnot solve", re.IGNORECASE | re.DOTALL)),
    ("check", re.compile(r"\b(check|verif|review)", re.IGNORECASE)),
    ("combine", re.compile(r"\b(weigh|compare|combine)", re.IGNORECASE)),
    ("reason", re.compile(r"step by step|\bplan\b", re.IGNORECASE)),
)
"""The words by which a subtask that is none of `SUBTASKS` asks for a role; the first that occur decide."""
DIGEST = re.compile(r"Digest (?P<key>[0-9a-f]{16}): (?P<state>complete|incomplete)\.")


class Library:
    """The tasks that are posed, by their text and by the key with which digests quote them."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._by_key = {key_of(task.text): task for task in tasks}

    def find(self, text: str) -> Task | None:
        """Return the task of this text, or of this key."""
        return self._by_key.get(text) or self._by_key.get(key_of(text.partition(DOCUMENT)[0]))


@dataclass(frozen=True, slots=True)
class Reply:
    """The words of a worker, and the tokens that the world counts for reading and writing."""

    text: str
    read: float
    written: float


@dataclass(slots=True)
class _Context:
    """All that a worker has before it."""

    role: str
    task: Task | None = None
    user: bool = False
    complete: bool = True
    """False for a digest that lacks something."""
    plan: str | None = None
    handed: dict[int, str] = field(default_factory=dict)
    """The answers of parts that were worked out apart."""
    answers: list[tuple[tuple[str, ...], list[str]]] = field(default_factory=list)
    """Whole answers: the hands that each went through, and its parts."""
    makers: list[str] = field(default_factory=list)
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of a plan."""

    right: bool
    usd: float
    seconds: float
    reward: float
    """The reward of the answer: 0 where it was wrong."""


def key_of(text: str) -> str:
    """Return the key with which a digest quotes a task."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def execute_plan(plan: Plan, task: Task, pool: Pool, random: Random, library: Library | None = None) -> Execution:
    """Carry a plan out once: the executor's composer writes what each worker is shown, and workers answer."""
    known, library = constants(), library or Library([task])
    by_name = {worker.name: worker for worker in pool}
    request = Request((Message("user", (Text(task.text),)),))
    earlier: dict[int, EarlierStep] = {}
    ends: dict[int, float] = {}
    usd, disclosed, text = 0.0, False, ""
    for n, step in enumerate(workflow(plan, tuple(by_name)).steps):
        worker = by_name[step.worker]
        messages = compose(request if step.access.user else None, step.subtask, visible_steps(step.access, earlier))
        answer = reply(worker, messages, library, random)
        text = answer.text
        earlier[n] = EarlierStep(n, step.subtask, text)
        usd += worker.price * (answer.written + known.input_share * answer.read) / 1e6
        duration = known.overhead_seconds + answer.read / known.read_per_second + answer.written / worker.card.speed
        ends[n] = max([ends[seen] for seen in step.access.steps], default=0.0) + duration
        disclosed = disclosed or (step.access.user and task.confidential and worker.card.retains)
    right = final_answer(text) == task.answer
    seconds = max(ends.values())
    worth = 1 - known.cost * min(1.0, usd / known.full_usd) - known.wait * min(1.0, seconds / known.full_seconds)
    return Execution(right, usd, seconds, (worth - known.disclosure * disclosed) * right)


def draw_verdict(right: bool, random: Random) -> bool:
    """Return what a judge says of an answer: it takes some wrong ones for right, and some right ones for wrong."""
    known = constants()
    if right:
        return random.random() >= known.judge_false_fail
    return random.random() < known.judge_false_pass


def final_answer(text: str) -> str:
    """Return the results that a text states, or nothing."""
    match = RESULTS.fullmatch(text)
    if match and match["part"] == WHOLE:
        return match["text"]
    return ""


def reply(worker: Worker, messages: Sequence[Message], library: Library, random: Random) -> Reply:
    """Return what this worker answers to these messages. Every call draws from `random`, so that two are not alike."""
    shown = _read_messages(messages, library)
    if shown.task is None:
        return Reply(CANNOT_KNOW, shown.tokens, constants().solve_tokens / 2)
    parts = len(shown.task.parts)
    tokens = output_tokens(shown.role, parts, len(shown.handed))
    task_tokens = size_of(shown.task).tokens if shown.user else constants().question_tokens / 2
    read = min(float(worker.card.context), task_tokens + shown.tokens)
    return Reply(_answer(worker, shown, shown.task, random), read, tokens)


def _read_messages(messages: Sequence[Message], library: Library) -> _Context:
    """Read the messages."""
    user_texts = [message.text for message in messages if message.role == "user"]
    last = user_texts[-1] if user_texts else ""
    steps = list(STEP.finditer(last))
    assigned = SUBTASK.search(last[steps[-1].end() :] if steps else last)
    if assigned is None:
        return _Context("solve", library.find(last), user=True)
    shown = _Context(role_of(assigned[1]))
    if len(user_texts) > 1:
        shown.task, shown.user = library.find(user_texts[-2]), True
    for step in steps:
        _add_earlier_step(shown, role_of(step["subtask"] or ""), step["answer"], library)
    return shown


def role_of(subtask: str) -> str:
    """Return the role that a subtask asks for; a plain solver for words that ask for no other."""
    named = next((role for role, words in SUBTASKS.items() if words == subtask.strip()), None)
    return named or next((role for role, words in ROLES if words.search(subtask)), "solve")


def _add_earlier_step(shown: _Context, role: str, text: str, library: Library) -> None:
    """Note what an earlier step says."""
    if match := DIGEST.fullmatch(text):
        shown.task = shown.task or library.find(match["key"])
        shown.complete = match["state"] == "complete"
    if match := PLAN.fullmatch(text):
        shown.plan = match["kinds"]
    if match := RESULTS.fullmatch(text):
        makers = match["hands"].split(", ")
        if match["part"] == WHOLE:
            shown.answers.append((tuple(makers), match["text"].split(SEPARATOR)))
        else:
            shown.handed[PARTIAL.index(match["part"].split()[0])] = match["text"]
            shown.makers += makers
    shown.tokens += tokens_passed_on(role, len(shown.task.parts) if shown.task else 1)


def _answer(worker: Worker, shown: _Context, task: Task, random: Random) -> str:
    known = constants()
    skill = known.check_skill * (worker.ability - known.ability_mean)
    short = known.truncated if worker.card.context < DOCUMENT_TOKENS[task.document] else 0.0
    if shown.role == "plan":
        kinds = [DOMAINS[part.family.domain] for part in task.parts]
        good = random.random() < logistic(known.plan_skill + skill)
        return f"Plan: {', '.join(kinds if good else [_next_domain(kind) for kind in kinds])}."
    if shown.role == "digest":
        keeps = known.digest_keeps + known.check_skill * worker.edges[LANGUAGE] + short
        state = "complete" if random.random() < logistic(keeps) else "incomplete"
        return f"Digest {key_of(task.text)}: {state}."
    if shown.role in PARTIAL:
        return _answer_one_part(worker, shown, task, random)
    return _answer_all_parts(worker, shown, task, random)


def _next_domain(kind: str) -> str:
    return DOMAINS[(DOMAINS.index(kind) + 1) % len(DOMAINS)]


def _answer_one_part(worker: Worker, shown: _Context, task: Task, random: Random) -> str:
    place = PARTIAL.index(shown.role)
    if place >= len(task.parts):
        return "There is no such part."
    text = _solve_part(worker, shown, task, place, random)
    return f"Worked out by {worker.name}. {shown.role} part: {text}"


def _answer_all_parts(worker: Worker, shown: _Context, task: Task, random: Random) -> str:
    """Return the results for all parts."""
    if shown.role in ("check", "combine") and not shown.answers:
        return CANNOT_KNOW
    makers = [*shown.makers, *[maker for hands, _ in shown.answers for maker in hands]]
    results = []
    for place in range(len(task.parts)):
        if shown.role == "check":
            results.append(_check_part(worker, shown, task, place, random))
        elif shown.role == "combine":
            results.append(_combine_part(worker, shown, task, place, random))
        elif place in shown.handed:
            spoiled = random.random() >= constants().handover
            results.append(task.parts[place].slip if spoiled else shown.handed[place])
        else:
            results.append(_solve_part(worker, shown, task, place, random))
    hands = ", ".join(dict.fromkeys([*makers, worker.name]))
    return f"Worked out by {hands}. {WHOLE} {SEPARATOR.join(results)}"


def _solve_part(worker: Worker, shown: _Context, task: Task, place: int, random: Random) -> str:
    known, part = constants(), task.parts[place]
    domain = part.family.domain
    logits = worker.ability + worker.edges[domain] - part.family.difficulty - known.trait_sd * TRAITS[task.trait]
    logits += known.reason[domain] if shown.role != "solve" else 0.0
    if shown.plan is not None:
        good = shown.plan.split(", ")[place] == DOMAINS[domain]
        logits += known.plan_good if good else known.plan_bad
    at_once = 1 if shown.role in PARTIAL else len(task.parts) - len(shown.handed)
    logits -= known.load * (at_once - 1)
    if shown.user:
        logits -= known.length[task.document]
        logits += known.truncated if worker.card.context < DOCUMENT_TOKENS[task.document] else 0.0
    elif not shown.complete:
        logits += known.digest_lost
    if random.random() < logistic(logits):
        return part.answer
    return part.slip


def _check_part(worker: Worker, shown: _Context, task: Task, place: int, random: Random) -> str:
    known, part = constants(), task.parts[place]
    skill = known.check_skill * (worker.ability - known.ability_mean)
    hands, results = shown.answers[-1]
    if results[place] == part.answer:
        if random.random() < logistic(known.keeps + skill):
            return part.answer
        return part.slip
    finds = (known.finds_own if worker.name in hands else known.finds_other) + skill
    if random.random() < logistic(finds):
        return _solve_part(worker, shown, task, place, random)
    return results[place]


def _combine_part(worker: Worker, shown: _Context, task: Task, place: int, random: Random) -> str:
    known, part = constants(), task.parts[place]
    right = sum([results[place] == part.answer for _, results in shown.answers])
    logits = combine_logit(right, len(shown.answers), known) if right else float("-inf")
    if 0 < right < len(shown.answers):
        logits += known.check_skill * (worker.ability - known.ability_mean)
    if right and random.random() < logistic(logits):
        return part.answer
    return part.slip
