"""The workers of world 2 behind the provider seam, for a whole Baton: pool files, tasks that they know, and answers.

In the pool file: a provider of the format `rehearsal` with the option `world = "2"`, and workers whose `model` is a
name of `workers.worker_profiles`. Their tasks are those of `service_tasks`: the hidden trait of a task is in no text,
so that workers have to know them. Every call draws from the provider's random generator, which begins at its `seed`; a
request with a seed of its own always gets the same answer.

The workers of the rehearsal pool (`app/process/config/rehearsal.toml`) are five of these profiles, under names of their
own (`rehearsal_workers`): they answer tasks of this world by them, and everything else as the rehearsal provider
does.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import Finish, Message
from app.lab.world2.constants import DOCUMENT_TOKENS, constants
from app.lab.world2.execution import CANNOT_KNOW, DOCUMENT, Library, reply, seconds_of
from app.lab.world2.shapes import MOST_STEPS
from app.lab.world2.tasks import WORDS, Split, Task, draw_tasks
from app.lab.world2.workers import LARGEST, Pool, Worker, draw_pool, worker_profiles

SPLITS: tuple[Split, ...] = ("train", "fresh", "phrasings", "families")
TASK_COUNT = 1_000
"""Tasks of each split that the workers of a service know."""
TIER = "baton-world2"
REHEARSAL_NAMES = ("sage", "scribe", "abacus", "almanac", "lawyer")
"""The names under which the profiles of `rehearsal_workers` answer, in the order in which these were drawn."""
CHARS_PER_TOKEN = 4.3
"""Characters of a document for each of its tokens."""


class ServedReply(Struct, frozen=True):
    """An answer, its tokens and seconds; `finish` is "length" where the request allowed too few tokens for it."""

    text: str
    input_tokens: int
    output_tokens: int
    seconds: float
    finish: Finish = "stop"


class SecondWorld:
    """All workers of world 2, and the tasks that they know."""

    def __init__(self, seed: str) -> None:
        everyone = (*worker_profiles(unseen=False), *worker_profiles(unseen=True))
        self._workers = {worker.name: worker for worker in everyone}
        for worker, name in rehearsal_workers():
            self._workers[name] = replace(worker, name=name)
        self._seed = seed
        self._random = Random(f"world-2|service|{seed}")

    def answer(
        self, name: str, messages: Sequence[Message], *, seed: int | None = None, most: int | None = None
    ) -> ServedReply | None:
        """Return what a worker answers, in at most so many tokens; None for one that is not of this world, and for a
        worker of the rehearsal pool that is asked something else."""
        worker = self._workers.get(name)
        if worker is None:
            return None
        random = self._random
        if seed is not None:
            random = Random(f"world-2|{self._seed}|{seed}|{name}|{[message.text for message in messages]}")
        answer = reply(worker, messages, library(), random)
        if answer.text == CANNOT_KNOW and name in REHEARSAL_NAMES:
            return None
        input_tokens = round(answer.input_tokens)
        if most is None or answer.output_tokens <= most:
            return ServedReply(answer.text, input_tokens, round(answer.output_tokens), seconds_of(answer, worker))
        text = answer.text[: int(len(answer.text) * most / answer.output_tokens)]
        seconds = seconds_of(replace(answer, output_tokens=most), worker)
        return ServedReply(text, input_tokens, round(most), seconds, "length")


@cache
def library() -> Library:
    """Return the tasks that the workers of a service know."""
    tasks: list[Task] = []
    for split in SPLITS:
        tasks += service_tasks(split)
    return Library(tasks)


@cache
def rehearsal_workers() -> tuple[tuple[Worker, str], ...]:
    """Return the profiles of the rehearsal pool with their names in it: five workers of training, drawn until the
    context of each holds the longest document."""
    random = Random("world-2|rehearsal|0")
    while True:
        workers = random.sample(worker_profiles(unseen=False), LARGEST)
        if min([worker.card.context for worker in workers]) > max(DOCUMENT_TOKENS):
            return tuple(zip(workers, REHEARSAL_NAMES, strict=True))


def service_tasks(split: Split) -> list[Task]:
    """Return the tasks of a split that the workers of a service know."""
    return draw_tasks(split, "service", TASK_COUNT)


def text_with_document(task: Task) -> str:
    """Return the text of a task with its document, of about as many tokens as the world counts for it. The document
    says nothing of the task: the world counts what it costs to read, and how much it distracts."""
    length = int(DOCUMENT_TOKENS[task.document] * CHARS_PER_TOKEN)
    if not length:
        return task.text
    random = Random(f"world-2|document|{task.text}")
    lines: list[str] = []
    size = 0
    while size < length:
        lines.append(f"Entry {len(lines) + 1}: the {random.choice(WORDS)} stands beside the {random.choice(WORDS)}.")
        size += len(lines[-1]) + 1
    return task.text + DOCUMENT + "\n".join(lines) + "\n</document>"


def task_set(split: Split, count: int = TASK_COUNT) -> Iterator[str]:
    """Return the lines of a task set, as `baton eval` and `baton grade` read it."""
    for number, task in enumerate(service_tasks(split)[:count]):
        rule: Mapping[str, str] = {"kind": "exact", "expected": task.answer}
        yield json.dumps({"id": f"{split} {number}", "question": text_with_document(task), "grader": rule})


def draw_numbered_pool(number: int, *, unseen: bool) -> Pool:
    """Return the pool of this number; `unseen`: of workers that training never meets."""
    return draw_pool(Random(f"world-2|pool file|{number}"), unseen_workers=unseen)


def pool_file(number: int, *, unseen: bool) -> str:
    """Return a pool file with the pool of this number."""
    chosen = draw_numbered_pool(number, unseen=unseen)
    names = ", ".join([f'"{worker.name}"' for worker in chosen])
    tier = TIERS.format(tier=TIER, names=names, first=chosen[0].name, steps=MOST_STEPS)
    return "".join([WORLD, *map(_worker_entry, chosen), tier])


def _worker_entry(worker: Worker) -> str:
    retention = 'retention = "none"\n'
    if worker.card.retains:
        retention = ""
    return WORKER.format(
        name=worker.name,
        input=worker.price * constants().input_share,
        output=worker.price,
        context=worker.card.context,
        speed=worker.card.speed,
        retention=retention,
        card=worker.card.words(),
    )


WORLD = """[providers.world]
format = "rehearsal"
options = { world = "2", delay = "0" }
"""
WORKER = """
# {card}
[workers.{name}]
provider = "world"
model = "{name}"
price = {{ input = {input:.6f}, output = {output:.6f}, cached = 0 }}
context = {context}
speed = {speed:g}
{retention}"""
TIERS = """
[tiers.{tier}]
pool = [{names}]
conductor = {{ kind = "fixed", shape = "single", workers = ["{first}"] }}
limits = {{ steps = {steps}, attempts = 2, seconds = 120, output_tokens = 1000 }}
"""
