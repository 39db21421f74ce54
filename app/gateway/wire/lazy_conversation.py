"""A conversation whose messages are made when somebody looks at them.

Who comes back with tool results sends all that was said before them, too, and a run that waits needs the results only.
Whatever could be wrong with a message must have been found before.
"""

from collections.abc import Callable, Sequence
from typing import Any, overload

from app.core.message.chat import Message


class Conversation(Sequence[Message]):
    """The messages that `make` makes of `written`. Who goes through all of them has them made for good."""

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
        """All of them; what they were made of is needed no longer."""
        if self._made is None:
            self._written = self._made = tuple(map(self._make, self._written))
        return self._made
