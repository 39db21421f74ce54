"""Reverse-mode derivatives of a few array operations, as far as `learning.py` needs them, so that it needs no torch."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Number: TypeAlias = Union["Value", NDArray[Any], float]


class Value:
    """An array, and how its derivative is passed on to the arrays that it was computed from."""

    __slots__ = ("array", "gradient", "sources")
    __array_ufunc__ = None
    """An array on the left of an operator leaves the operation to this class."""

    def __init__(self, array: Array, sources: Sequence[tuple["Value", Callable[[Array], Array]]] = ()) -> None:
        self.array = array
        self.sources = sources
        self.gradient: Array | None = None

    def __add__(self, other: Number) -> "Value":
        second = _value(other)
        return Value(self.array + second.array, [(self, _same), (second, _same)])

    def __sub__(self, other: Number) -> "Value":
        second = _value(other)
        return Value(self.array - second.array, [(self, _same), (second, np.negative)])

    def __mul__(self, other: Number) -> "Value":
        second = _value(other)
        sources = [(self, lambda passed: passed * second.array), (second, lambda passed: passed * self.array)]
        return Value(self.array * second.array, sources)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: Number) -> "Value":
        return _value(other) - self

    def at(self, places: NDArray[np.int64]) -> "Value":
        """Return one element of each row of a matrix, at these places."""
        rows = np.arange(len(places))

        def spread(passed: Array) -> Array:
            gradient = np.zeros_like(self.array)
            gradient[rows, places] = passed
            return gradient

        return Value(self.array[rows, places], [(self, spread)])

    def column(self) -> "Value":
        """Return a row as a column."""
        return Value(self.array[:, None], [(self, lambda passed: passed.sum(axis=1))])

    def mean_of_rows(self) -> "Value":
        """Return the mean of each row."""
        count = self.array.shape[1]
        return Value(
            self.array.mean(axis=1), [(self, lambda passed: np.repeat(passed[:, None] / count, count, axis=1))]
        )

    def logistic(self) -> "Value":
        """Return the chances of these logits."""
        chances = 1 / (1 + np.exp(-self.array))
        return Value(chances, [(self, lambda passed: passed * chances * (1 - chances))])

    def exponential(self) -> "Value":
        """Return the exponentials of these numbers."""
        raised = np.exp(self.array)
        return Value(raised, [(self, lambda passed: passed * raised)])

    def backward(self, passed: Array) -> None:
        """Give every array that this one was computed from its derivative, from the derivative of this one."""
        order: list[Value] = []
        visited: set[int] = set()
        _order(self, order, visited)
        self.gradient = passed
        for value in reversed(order):
            if value.gradient is None:
                continue
            for source, rule in value.sources:
                part = _sum_to_shape(rule(value.gradient), source.array.shape)
                source.gradient = part if source.gradient is None else source.gradient + part


def _order(value: Value, order: list[Value], visited: set[int]) -> None:
    """Append the nodes to the order, sources before what is computed from them."""
    if id(value) in visited:
        return
    visited.add(id(value))
    for source, _ in value.sources:
        _order(source, order, visited)
    order.append(value)


def _value(number: Number) -> Value:
    if isinstance(number, Value):
        return number
    return Value(np.asarray(number, dtype=float))


def _same(passed: Array) -> Array:
    return passed


def _sum_to_shape(passed: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of this shape was repeated."""
    while passed.ndim > len(shape):
        passed = passed.sum(axis=0)
    for axis, length in enumerate(shape):
        if length == 1 and passed.shape[axis] != 1:
            passed = passed.sum(axis=axis, keepdims=True)
    return passed
