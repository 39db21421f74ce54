"""Isolates a world: it has chance, the garbage collector and the log to itself for a while."""

import gc
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from app.store import sql
from tests.simulation import database as databases

LOGGERS = ("baton", "app.process.clock", "app.store.writing.group_commit")


class Log(logging.Handler):
    """The errors that the product logs, for the world to judge."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors += leaves(record.exc_info[1])


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in a tree of them."""
    if isinstance(error, BaseExceptionGroup):
        for exception in error.exceptions:
            yield from leaves(exception)
    else:
        yield error


@contextmanager
def alone(seed: int, log: Log) -> Iterator[None]:
    """The standard library's chance is the world's, garbage is collected later, and only `log` hears."""
    state, enabled = random.getstate(), gc.isenabled()
    random.seed(seed)
    gc.disable()  # when that happens is no matter of the seed, and async generators notice it
    try:
        with patch.object(sql, "Statements", databases.statements), _listen_to_logs(log):
            yield
    finally:
        random.setstate(state)
        if enabled:
            gc.enable()


@contextmanager
def _listen_to_logs(log: Log) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(log)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, levels, strict=True):
            logger.removeHandler(log)
            logger.setLevel(level)
            logger.propagate = propagate
