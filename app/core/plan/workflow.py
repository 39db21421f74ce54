"""Workflows as data: ordered steps, the last of which answers.

A step lives in a run under one number `n` that counts on over proposals and rounds, so that a step can be named for
ever. In a plan, and in an access list as a conductor writes it, steps are counted from 0 within that plan;
`Access.shift` translates. `proposals.py` reads plans as conductors and callers write them.
"""

import re
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

Topology = Literal["single", "chain", "fan-out", "tree", "debate"]
CONDUCTOR = "@conductor"
"""The worker of a step that the conductor itself takes: it opens a workflow for it. No worker can have this name."""
FINAL_ANSWER = re.compile(r"(?P<sentence>[^.;:!?]*)final answer", re.IGNORECASE)
"""Where a subtask speaks of the final answer, with what stands before that in the same part of a sentence."""
DENIAL = re.compile(r"\b(?:not|no|never|without|don't)\b", re.IGNORECASE)
"""Words before it by which the subtask says that it does not want the final answer."""
PREVIOUS = "previous"
"""The entry of an access list by which the plan of a further round names the answer of the round before."""


class Access(Struct, frozen=True):
    """The access list of a step: it sees the caller's conversation, if listed, and the listed earlier steps, and
    nothing else.

    A plan may also say `previous`, for the answer of the round before; in the run's own numbers that is a step like
    any other.
    """

    user: bool = True
    steps: tuple[int, ...] = ()
    previous: bool = False

    def shift(self, by: int, previous: int | None = None) -> "Access":
        """Return the list with plan positions turned into the run's step numbers; `previous` is the number of the step
        that gave the answer of the round before."""
        before = (previous,) if self.previous and previous is not None else ()
        return Access(self.user, (*before, *(n + by for n in self.steps)))

    def places(self, base: int) -> tuple[int, ...]:
        """Return the listed steps of the plan whose first step has the number `base`, by their places in that plan."""
        return tuple([n - base for n in self.steps if n >= base])

    def as_list(self) -> list[str | int]:
        """Return the form of plans and of the audit trail: `["user", 0, 1]`."""
        entries: list[str | int] = []
        if self.user:
            entries.append("user")
        if self.previous:
            entries.append(PREVIOUS)
        return entries + list(self.steps)


def access_from_list(entries: Sequence[str | int]) -> Access:
    """Return the inverse of `Access.as_list`; trusts its input."""
    steps = tuple(entry for entry in entries if isinstance(entry, int))
    return Access("user" in entries, steps, PREVIOUS in entries)


class Step(Struct, frozen=True):
    """One subtask for one worker. An empty subtask means: answer the conversation as it stands."""

    worker: str
    subtask: str = ""
    access: Access = Access()
    answers: bool = False
    """True if its output is the answer: for a workflow's last step and for no other."""
    probability: float | None = None
    """The conductor's probability of this worker, where its decoder reports it."""
    tools: bool = False
    """True if it may call the caller's tools; the answering step always may."""
    why: str = ""
    """The conductor's reason for this worker, which is not trusted and decides nothing; empty where it gave none."""
    why_withheld: str = ""
    """Its reason for what the access list leaves out."""


def asks_for_answer(subtask: str) -> bool:
    """Return True if a subtask asks for the final answer to the task, as conductors are told to write it; an empty
    subtask is the task itself."""
    if not subtask:
        return True
    match = FINAL_ANSWER.search(subtask)
    if match is None:
        return False
    denial = DENIAL.search(subtask, match.start("sentence"), match.end())
    return denial is None


class Workflow(Struct, frozen=True):
    """A validated proposal; steps are counted from 0."""

    steps: tuple[Step, ...]

    @property
    def topology(self) -> Topology:
        """Return the shape of the access lists."""
        return topology([step.access.steps for step in self.steps])


def topology(inputs: Sequence[Sequence[int]]) -> Topology:
    """Name the shape of a graph given as each step's earlier inputs.

    `single` is one step; `chain` follows one line; `fan-out` has independent steps that one last step joins; `debate`
    has at least two layers of two or more steps, each of a later layer reading several of the layer before; anything
    else is a `tree`.
    """
    if len(inputs) == 1:
        return "single"
    last = len(inputs) - 1
    if all(not step_inputs for step_inputs in inputs[:last]) and len(inputs[last]) == last and last > 1:
        return "fan-out"
    depths = step_depths(inputs)
    if max(depths) == last:
        return "chain"
    layers: list[list[int]] = [[] for _ in range(max(depths) + 1)]
    for n, depth in enumerate(depths):
        layers[depth].append(n)
    wide_layers = [layer for layer in layers if len(layer) > 1]
    if len(wide_layers) < 2:
        return "tree"
    for layer in wide_layers[1:]:
        if any(len(inputs[n]) < 2 for n in layer):
            return "tree"
    return "debate"


def step_depths(inputs: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of steps before each step on the longest path to it, in a graph as in `topology`."""
    depths: list[int] = []
    for step_inputs in inputs:
        depths.append(max([1 + depths[n] for n in step_inputs], default=0))
    return depths


def critical_path_seconds(inputs: Sequence[Sequence[int]], seconds: Sequence[float]) -> float:
    """Return the seconds of the longest path through a graph as in `topology` whose steps take these `seconds`."""
    ends: list[float] = []
    for step_inputs, own in zip(inputs, seconds, strict=True):
        ends.append(max([ends[n] for n in step_inputs], default=0.0) + own)
    return max(ends, default=0.0)
