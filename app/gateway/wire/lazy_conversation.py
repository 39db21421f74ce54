"""A conversation whose messages are converted when they are first read.

A request that brings tool results repeats the whole conversation before them, of which the waiting run needs only the
results. Every message must have been validated before.
"""

from collections.abc import Callable, Sequence
from typing import Any, overload

from app.core.message.chat import Message


class LazyConversation(Sequence[Message]):
    """The messages that `make` makes of `written`. Iteration converts all of them once."""

    __slots__ = ("_made", "_make", "_written")

    def __init__(self, written: Sequence[Any], make: Callable[[Any], Message]) -> None:
        self._written = written
        self._make = make
        self._made: tuple[Message, ...] | None = None

    def __len__(self) -> int:
        return len(self._written)

    @overload
    def __getitem__(self, place: int) -> Message: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Message, ...]: ...
    def __getitem__(self, place: int | slice) -> Message | tuple[Message, ...]:
        if self._made is None and isinstance(place, int):
            return self._make(self._written[place])
        return self._whole()[place]

    def __iter__(self) -> Any:
        return iter(self._whole())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._whole() == tuple(other)

    def _whole(self) -> tuple[Message, ...]:
        """All messages; what they were made of is dropped."""
        if self._made is None:
            self._written = self._made = tuple(map(self._make, self._written))
        return self._made
