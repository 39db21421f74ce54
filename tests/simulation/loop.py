"""An event loop in virtual time, shared by machines that can be held and let go.

Time stands still while anything can run, and jumps to the next timer when nothing can. Every callback belongs to the
machine in whose context it was scheduled. Within a machine callbacks keep the order that asyncio promises; whose
callback comes next is chance, as it is between computers. A held machine's callbacks pile up: for a while (frozen: a
zombie when it comes back) or for good (dead). Nothing sleeps, and there are no threads and no sockets.
"""

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

MACHINE: ContextVar["Machine"] = ContextVar("machine")
EPOCH = 1_700_000_000.0
"""What a clock that is right says when a world begins."""
TURN = 5e-6
"""Seconds that one callback takes, so that no two writes have the same time."""


class Stuck(Exception):
    """Nothing can run and nothing is due, or far more ran than a world needs."""


class Machine:
    """A machine on which callbacks run; while it is held, they wait."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held = False
        self.dead = False
        self.waiting: deque[asyncio.Handle] = deque()
        self.tasks: list[asyncio.Task[Any]] = []
        self.context: Context = copy_context()
        self.context.run(MACHINE.set, self)


class OrderedTask(asyncio.Task):
    """A task whose place in a set does not depend on its address."""

    serial = 0

    def __hash__(self) -> int:
        return self.serial


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module docstring. `turns` counts the callbacks that ran; at most `bound` may."""

    def __init__(self, seed: str, bound: int) -> None:
        super().__init__()
        self.outside = Machine("outside")
        self.turns = 0
        self._bound = bound
        self._seconds = 0.0
        self._chance = random.Random(seed).random
        self._runnable: list[Machine] = []
        self._machines = [self.outside]
        self._serial = 0
        self.set_task_factory(self._task)

    def time(self) -> float:
        """Virtual seconds since the world began."""
        return self._seconds

    def machine(self, name: str) -> Machine:
        """Return a new machine."""
        machine = Machine(name)
        self._machines.append(machine)
        return machine

    def hold(self, machine: Machine) -> None:
        """From now on nothing of this machine runs; what is running ends with its next await."""
        machine.held = True
        if machine in self._runnable:
            self._runnable.remove(machine)

    def let_go(self, machine: Machine) -> None:
        """Everything that piled up runs now."""
        machine.held = False
        if machine.waiting and machine not in self._runnable:
            self._runnable.append(machine)

    def spawn(self, machine: Machine, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a coroutine on a machine."""
        return machine.context.copy().run(self.create_task, work)

    def bury(self) -> int:
        """Cancel whatever is left, on held machines too; how many tasks would not end. The seams must refuse by now."""
        for machine in self._machines:
            self.let_go(machine)
        self._bound = self.turns + 50_000
        asyncio._set_running_loop(self)
        try:
            left = self._cancel_all(rounds=20)
        finally:
            asyncio._set_running_loop(None)
        for task in left:
            task._log_destroy_pending = False
        for task in (task for machine in self._machines for task in machine.tasks):
            if task.done() and not task.cancelled():
                task.exception()  # so that nobody complains that it was never asked for
        return len(left)

    def _cancel_all(self, rounds: int) -> list[asyncio.Task[Any]]:
        left: list[asyncio.Task[Any]] = []
        for _ in range(rounds):
            left = [task for machine in self._machines for task in machine.tasks if not task.done()]
            for task in left:
                task.cancel()
            while self._ready or self._runnable:
                self._run_once()
        return [task for task in left if not task.done()]

    def _task(self, loop: asyncio.AbstractEventLoop, coro: Any, context: Context | None = None) -> OrderedTask:
        task: OrderedTask = OrderedTask.__new__(OrderedTask)
        self._serial += 1
        task.serial = self._serial
        task.__init__(coro, loop=loop, context=context)
        machine = context.get(MACHINE, self.outside) if context is not None else MACHINE.get(self.outside)
        machine.tasks.append(task)
        return task

    def _run_once(self) -> None:
        while self._ready:
            self._file(self._ready.popleft())
        due = self._scheduled
        while due and (due[0]._cancelled or due[0]._when <= self._seconds):
            timer = heapq.heappop(due)
            timer._scheduled = False
            if not timer._cancelled:
                self._file(timer)
        if self._runnable:
            self._turn()
        elif due:
            self._seconds = due[0]._when
        elif not self._stopping:
            raise Stuck("nothing can run, and nothing is due")

    def _file(self, handle: Any) -> None:
        machine = handle._context.get(MACHINE, self.outside)
        machine.waiting.append(handle)
        if len(machine.waiting) == 1 and not machine.held:
            self._runnable.append(machine)

    def _turn(self) -> None:
        place = int(self._chance() * len(self._runnable)) if len(self._runnable) > 1 else 0
        machine = self._runnable[place]
        handle = machine.waiting.popleft()
        if not machine.waiting:
            self._runnable[place] = self._runnable[-1]
            self._runnable.pop()
        if handle._cancelled:
            return
        self.turns += 1
        self._seconds += TURN
        handle._run()
        if self.turns > self._bound:
            raise Stuck(f"{self.turns} callbacks, and no end")

    def _write_to_self(self) -> None:
        """There is no other thread to wake this one."""

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no sockets."""
