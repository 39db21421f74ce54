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

from msgspec import Struct

from app.core.message.chat import Message, Text
from app.core.message.chat import Task as Request
from app.core.run.visibility import EarlierStep, compose, visible_steps
from app.lab.workers import SUBTASK
from app.lab.world2.constants import DOCUMENT_TOKENS, DOMAINS, TRAITS, constants
from app.lab.world2.rules import LANGUAGE, PARTIAL, combine_logit, output_tokens, size_of, tokens_passed_on
from app.lab.world2.shapes import SUBTASKS, Plan, workflow
from app.lab.world2.tasks import SEPARATOR, Task
from app.lab.world2.workers import Pool, Worker, logistic
from app.providers.rehearsal.fenced_steps import read_steps

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
        self._by_key: dict[str, Task] = {}
        for task in tasks:
            self._by_key[key_of(task.text)] = task

    def find(self, text: str) -> Task | None:
        """Return the task of this text, or of this key."""
        return self._by_key.get(text) or self._by_key.get(key_of(text.partition(DOCUMENT)[0]))


class Reply(Struct, frozen=True):
    """The words of a worker, and the tokens that the world counts for reading and writing."""

    text: str
    input_tokens: float
    output_tokens: float


@dataclass(slots=True)
class _Context:
    """All that a worker has before it."""

    role: str
    task: Task | None = None
    user: bool = False
    complete: bool = True
    """False for a digest that lacks something."""
    plan: str | None = None
    part_answers: dict[int, str] = field(default_factory=dict)
    """The answers of parts that were worked out apart, by the place of the part."""
    answers: list[tuple[tuple[str, ...], list[str]]] = field(default_factory=list)
    """Whole answers: the hands that each went through, and its parts."""
    makers: list[str] = field(default_factory=list)
    tokens: float = 0.0


class Execution(Struct, frozen=True):
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
    world, library = constants(), library or Library([task])
    by_name = {worker.name: worker for worker in pool}
    request = Request((Message("user", (Text(task.text),)),))
    earlier: dict[int, EarlierStep] = {}
    ends: dict[int, float] = {}
    usd, disclosed, text = 0.0, False, ""
    for n, step in enumerate(workflow(plan, tuple(by_name)).steps):
        worker = by_name[step.worker]
        granted = None
        if step.access.user:
            granted = request
        messages = compose(granted, step.subtask, visible_steps(step.access, earlier))
        answer = reply(worker, messages, library, random)
        text = answer.text
        earlier[n] = EarlierStep(n, step.subtask, text)
        usd += worker.price * (answer.output_tokens + world.input_share * answer.input_tokens) / 1e6
        begin = max([ends[place] for place in step.access.steps], default=0.0)
        ends[n] = begin + seconds_of(answer, worker)
        disclosed = disclosed or (step.access.user and task.confidential and worker.card.retains)
    right = final_answer(text) == task.answer
    seconds = max(ends.values())
    worth = 1 - world.cost * min(1.0, usd / world.full_usd) - world.wait * min(1.0, seconds / world.full_seconds)
    return Execution(right, usd, seconds, (worth - world.disclosure * disclosed) * right)


def seconds_of(answer: Reply, worker: Worker) -> float:
    """Return how long a worker takes to read and to answer."""
    world = constants()
    reading = answer.input_tokens / world.read_per_second
    writing = answer.output_tokens / worker.card.speed
    return world.overhead_seconds + reading + writing


def draw_verdict(right: bool, random: Random) -> bool:
    """Return what a judge says of an answer: it takes some wrong ones for right, and some right ones for wrong."""
    world = constants()
    if right:
        return random.random() >= world.judge_false_fail
    return random.random() < world.judge_false_pass


def final_answer(text: str) -> str:
    """Return the results that a text states, or nothing."""
    match = RESULTS.fullmatch(text)
    if match and match["part"] == WHOLE:
        return match["text"]
    return ""


def reply(worker: Worker, messages: Sequence[Message], library: Library, random: Random) -> Reply:
    """Return what this worker answers to these messages. Every call draws from `random`, so that two are not alike."""
    context = _read_messages(messages, library)
    if context.task is None:
        return Reply(CANNOT_KNOW, context.tokens, constants().solve_tokens / 2)
    parts = len(context.task.parts)
    writes = output_tokens(context.role, parts, len(context.part_answers))
    task_tokens = constants().question_tokens / 2
    if context.user:
        task_tokens = size_of(context.task).tokens
    reads = min(float(worker.card.context), task_tokens + context.tokens)
    return Reply(_answer(worker, context, context.task, random), reads, writes)


def _read_messages(messages: Sequence[Message], library: Library) -> _Context:
    """Return what a worker takes from its messages."""
    user_texts = [message.text for message in messages if message.role == "user"]
    last = user_texts[-1] if user_texts else ""
    steps = read_steps(last)
    end_of_steps = steps[-1].end if steps else 0
    assigned = SUBTASK.search(last[end_of_steps:])
    if assigned is None:
        return _Context("solve", library.find(last), user=True)
    context = _Context(role_of(assigned[1]))
    if len(user_texts) > 1:
        context.task, context.user = library.find(user_texts[-2]), True
    for step in steps:
        _add_earlier_step(context, role_of(step.subtask), step.answer, library)
    return context


def role_of(subtask: str) -> str:
    """Return the role that a subtask asks for; a plain solver for words that ask for no other."""
    for role, words in SUBTASKS.items():
        if words == subtask.strip():
            return role
    for role, pattern in ROLES:
        if pattern.search(subtask):
            return role
    return "solve"


def _add_earlier_step(context: _Context, role: str, text: str, library: Library) -> None:
    """Add what an earlier step says to what a worker has before it."""
    if match := DIGEST.fullmatch(text):
        context.task = context.task or library.find(match["key"])
        context.complete = match["state"] == "complete"
    if match := PLAN.fullmatch(text):
        context.plan = match["kinds"]
    if match := RESULTS.fullmatch(text):
        makers = match["hands"].split(", ")
        if match["part"] == WHOLE:
            context.answers.append((tuple(makers), match["text"].split(SEPARATOR)))
        else:
            context.part_answers[PARTIAL.index(match["part"].split()[0])] = match["text"]
            context.makers += makers
    parts = len(context.task.parts) if context.task else 1
    context.tokens += tokens_passed_on(role, parts)


def _answer(worker: Worker, context: _Context, task: Task, random: Random) -> str:
    """Return the words of a worker that knows the task: a plan, a digest, or results of one part or of all parts."""
    if context.role == "plan":
        return _plan_text(worker, task, random)
    if context.role == "digest":
        return _digest_text(worker, task, random)
    if context.role in PARTIAL:
        return _answer_one_part(worker, context, task, random)
    return _answer_all_parts(worker, context, task, random)


def _plan_text(worker: Worker, task: Task, random: Random) -> str:
    """Return a plan. A good one names the domain of each part, a bad one names the domain after it."""
    shift = 1
    if random.random() < logistic(constants().plan_skill + _check_skill(worker)):
        shift = 0
    kinds = [DOMAINS[(part.family.domain + shift) % len(DOMAINS)] for part in task.parts]
    return f"Plan: {', '.join(kinds)}."


def _digest_text(worker: Worker, task: Task, random: Random) -> str:
    world = constants()
    keeps = world.digest_keeps + world.check_skill * worker.edges[LANGUAGE] + _truncation(worker, task)
    state = "incomplete"
    if random.random() < logistic(keeps):
        state = "complete"
    return f"Digest {key_of(task.text)}: {state}."


def _check_skill(worker: Worker) -> float:
    """Return by how much, in logits, a worker plans, checks and chooses better than one of mean ability."""
    world = constants()
    return world.check_skill * (worker.ability - world.ability_mean)


def _truncation(worker: Worker, task: Task) -> float:
    """Return the loss, in logits, of a worker whose context is shorter than the document."""
    if worker.card.context < DOCUMENT_TOKENS[task.document]:
        return constants().truncated
    return 0.0


def _answer_one_part(worker: Worker, context: _Context, task: Task, random: Random) -> str:
    place = PARTIAL.index(context.role)
    if place >= len(task.parts):
        return "There is no such part."
    text = _solve_part(worker, context, task, place, random)
    return f"Worked out by {worker.name}. {context.role} part: {text}"


def _answer_all_parts(worker: Worker, context: _Context, task: Task, random: Random) -> str:
    """Return the results for all parts."""
    if context.role in ("check", "combine") and not context.answers:
        return CANNOT_KNOW
    makers = list(context.makers)
    for hands, _ in context.answers:
        makers += hands
    makers.append(worker.name)
    results = []
    for place in range(len(task.parts)):
        if context.role == "check":
            results.append(_check_part(worker, context, task, place, random))
        elif context.role == "combine":
            results.append(_combine_part(worker, context, task, place, random))
        elif place in context.part_answers:
            results.append(_take_over_part(context, task, place, random))
        else:
            results.append(_solve_part(worker, context, task, place, random))
    return f"Worked out by {', '.join(dict.fromkeys(makers))}. {WHOLE} {SEPARATOR.join(results)}"


def _take_over_part(context: _Context, task: Task, place: int, random: Random) -> str:
    """Return the answer of a part that was worked out apart, which is now and then spoiled when it is taken over."""
    if random.random() < constants().handover:
        return context.part_answers[place]
    return task.parts[place].slip


def _solve_part(worker: Worker, context: _Context, task: Task, place: int, random: Random) -> str:
    world, part = constants(), task.parts[place]
    domain = part.family.domain
    logits = worker.ability + worker.edges[domain] - part.family.difficulty - world.trait_sd * TRAITS[task.trait]
    if context.role != "solve":
        logits += world.reason[domain]
    if context.plan is not None:
        if context.plan.split(", ")[place] == DOMAINS[domain]:
            logits += world.plan_good
        else:
            logits += world.plan_bad
    at_once = len(task.parts) - len(context.part_answers)
    if context.role in PARTIAL:
        at_once = 1
    logits -= world.load * (at_once - 1)
    if context.user:
        logits -= world.length[task.document]
        logits += _truncation(worker, task)
    elif not context.complete:
        logits += world.digest_lost
    if random.random() < logistic(logits):
        return part.answer
    return part.slip


def _check_part(worker: Worker, context: _Context, task: Task, place: int, random: Random) -> str:
    world, part = constants(), task.parts[place]
    skill = _check_skill(worker)
    hands, results = context.answers[-1]
    if results[place] == part.answer:
        if random.random() < logistic(world.keeps + skill):
            return part.answer
        return part.slip
    finds = world.finds_other + skill
    if worker.name in hands:
        finds = world.finds_own + skill
    if random.random() < logistic(finds):
        return _solve_part(worker, context, task, place, random)
    return results[place]


def _combine_part(worker: Worker, context: _Context, task: Task, place: int, random: Random) -> str:
    part = task.parts[place]
    right = sum([results[place] == part.answer for _, results in context.answers])
    if not right:
        return part.slip
    logits = combine_logit(right, len(context.answers), constants())
    if right < len(context.answers):
        logits += _check_skill(worker)
    if random.random() < logistic(logits):
        return part.answer
    return part.slip
