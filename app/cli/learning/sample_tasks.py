"""The task set that comes with `baton eval`: tasks of the lab's second world, which rehearsal workers solve or fail at.

They are fresh ones of the kind that the rehearsal conductor has learned from, and none that it has met. Against real
models they measure nothing: bring your own. Another choice of tasks is another `VERSION`.
"""

from app.lab.world2.provider import task_set

VERSION = "eval-3"
TASKS = 60


def lines() -> list[str]:
    """Return the task set as JSON lines: the same in every process."""
    return list(task_set("fresh", TASKS))
