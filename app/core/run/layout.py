"""The layout of a graph that grows: columns by the longest path, rows by the barycentre, all in whole numbers.

Nodes are placed one after the other, in the order in which they appeared in the journal, and each only by nodes before
it. So a node that has its place keeps it, whatever is added later: the layout of a prefix is a prefix of the layout.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct


class Place(Struct, frozen=True):
    """The place of a node: its column, from the left, and its row, from the top; both from 0."""

    x: int
    y: int


def layout(nodes: Iterable[tuple[str, Sequence[str]]]) -> Mapping[str, Place]:
    """Return the place of each node, given with the nodes before it that it follows from. No two nodes have the same
    place.

    The column is one more than the greatest of those that the node follows from. The row is the free one in that column
    which is nearest to the mean of their rows; of two that are equally near it is the lower one on the page.
    """
    places: dict[str, Place] = {}
    rows_by_column: dict[int, set[int]] = {}
    for name, sources in nodes:
        before = [places[source] for source in sources]
        column = 1 + max([node.x for node in before], default=-1)
        rows = rows_by_column.setdefault(column, set())
        row = _nearest(_mean([node.y for node in before]), rows)
        rows.add(row)
        places[name] = Place(column, row)
    return places


def _mean(rows: Sequence[int]) -> int:
    """Return the mean of rows, rounded to a row; the first row if there are none."""
    if not rows:
        return 0
    return (2 * sum(rows) + len(rows)) // (2 * len(rows))


def _nearest(target: int, occupied_rows: set[int]) -> int:
    """Return the free row that is nearest to the wanted one."""
    distance = 0
    while True:
        for row in (target + distance, target - distance):
            if row >= 0 and row not in occupied_rows:
                return row
        distance += 1
