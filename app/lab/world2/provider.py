"""The workers of world 2 behind the provider seam, for a whole Baton: pool files, tasks that they know, and answers.

In the pool file: a provider of the format `rehearsal` with the option `world = "2"`, and workers whose `model` is a
name of `workers.workers`. Their tasks are those of `posed`: the hidden trait of a task is in no text, so that workers
have to know them. Every call draws from the provider's dice, which begin at its `seed`.
"""

import json
from collections.abc import Iterator, Sequence
from random import Random

from app.core.message.chat import Message
from app.lab.world2.constants import constants
from app.lab.world2.execution import Library, Reply, reply
from app.lab.world2.shapes import MOST_STEPS
from app.lab.world2.tasks import Split, Task, tasks
from app.lab.world2.workers import Pool, Worker, pool, workers

SPLITS: tuple[Split, ...] = ("train", "fresh", "phrasings", "families")
POSED = 1_000
"""Tasks of each split that the workers of a service know."""
TIER = "baton-world2"


class SecondWorld:
    """All workers of world 2, and the tasks that they know."""

    def __init__(self, seed: str) -> None:
        everyone = (*workers(unseen=False), *workers(unseen=True))
        self._workers = {worker.name: worker for worker in everyone}
        self._library = Library([task for split in SPLITS for task in posed(split)])
        self._random = Random(f"world-2|service|{seed}")

    def answer(self, name: str, messages: Sequence[Message]) -> tuple[Reply, float] | None:
        """Return what a worker answers and how many seconds it takes; None for one that is not of this world."""
        worker = self._workers.get(name)
        if worker is None:
            return None
        said, known = reply(worker, messages, self._library, self._random), constants()
        reading = said.read / known.read_per_second
        return said, known.overhead_seconds + reading + said.written / worker.card.speed


def posed(split: Split) -> list[Task]:
    """Return the tasks of a split that the workers of a service know."""
    return tasks(split, "service", POSED)


def task_set(split: Split) -> Iterator[str]:
    """Return the lines of a task set, as `baton eval` and `baton grade` read it."""
    for task in posed(split):
        yield json.dumps({"question": task.text, "grader": {"kind": "exact", "expected": task.answer}})


def numbered(number: int, *, unseen: bool) -> Pool:
    """Return the pool of this number; `unseen`: of workers that training never meets."""
    return pool(Random(f"world-2|pool file|{number}"), unseen_workers=unseen)


def pool_file(number: int, *, unseen: bool) -> str:
    """Return a pool file with the pool of this number."""
    chosen = numbered(number, unseen=unseen)
    names = ", ".join(f'"{worker.name}"' for worker in chosen)
    tier = TIERS.format(tier=TIER, names=names, first=chosen[0].name, steps=MOST_STEPS)
    return "".join([WORLD, *map(_worker, chosen), tier])


def _worker(worker: Worker) -> str:
    retention = "" if worker.card.retains else 'retention = "none"\n'
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
