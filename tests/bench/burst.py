"""Measure the service's processor time before the first token of streams that are requested at once.

    python -m tests.bench.burst [--streams 1 4 16] [--bursts 20]

A burst of n requests is sent over n open connections, to a worker that begins to answer after 20 ms. Printed are the
milliseconds of processor time that the service has used since, when the first, the middle and the last of them get
their first token, and until all streams are over: medians over the bursts. Processor time depends little on what else
the machine does, so these figures say also on a busy machine where the latency of `added TTFT` in the table comes from.
Needs Linux, whose /proc counts it in nanoseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from .load import Load, compose
from .processes import upstream
from .subject import Target, baton, headers, one_step

TOKEN = re.compile(rb'"content"\s*:\s*"[^"]')
END = b"0\r\n\r\n"
"""The last chunk of a streamed reply."""
WARM_UP = 3
"""Bursts of each size that do not count."""
REST_SECONDS = 0.1
"""Time between two bursts, so that nothing of the one before is left."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Burst(Struct, frozen=True):
    """The processor time in ms that had passed at each first token, in their order, and at the end."""

    firsts: tuple[float, ...]
    whole: float


def read_used_ms(target: Target) -> float:
    """The processor time of all threads of the service, in ms."""
    total = 0
    for process in target.processes:
        for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            total += int(path.read_text().split()[0])
    return total / 1e6


async def burst(target: Target, request: bytes, connections: Sequence[Connection]) -> Burst:
    """Send the request over each of the connections at once, and read the streams to their end."""
    began = read_used_ms(target)
    firsts: list[float] = []

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request)
        reply, has_token = b"", False
        while not reply.endswith(END):
            reply += await reader.read(65_536)
            if not has_token and TOKEN.search(reply):
                has_token = True
                firsts.append(read_used_ms(target) - began)

    await asyncio.gather(*[one(*connection) for connection in connections])
    return Burst(tuple(firsts), read_used_ms(target) - began)


async def measure_bursts(target: Target, sizes: Sequence[int], bursts: int) -> dict[int, list[Burst]]:
    """Bursts of each size, one size after the other in every round."""
    url = urlsplit(target.url)
    request = compose(Load(url=target.address("talker"), body=one_step("talker", stream=True), headers=headers()))
    connections = [await asyncio.open_connection(url.hostname, url.port) for _ in range(max(sizes))]
    bursts_by_size: dict[int, list[Burst]] = {size: [] for size in sizes}
    for _ in range(WARM_UP + bursts):
        for size in sizes:
            bursts_by_size[size].append(await burst(target, request, connections[:size]))
            await asyncio.sleep(REST_SECONDS)
    return {size: bursts[WARM_UP:] for size, bursts in bursts_by_size.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.burst", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="the sizes of the bursts")
    parser.add_argument("--bursts", type=int, default=20, help="bursts of each size that count")
    chosen = parser.parse_args()
    with upstream() as workers, baton(workers.url, name="embedded") as target:
        bursts_by_size = asyncio.run(measure_bursts(target, chosen.streams, chosen.bursts))
    print("streams  first  middle  last token  all over  (ms of CPU)")
    for size, bursts in bursts_by_size.items():
        first, middle, last = [_at(bursts, place) for place in (0, (size - 1) // 2, size - 1)]
        whole = statistics.median([burst.whole for burst in bursts])
        print(f"{size:7} {first:6.1f} {middle:7.1f} {last:11.1f} {whole:9.1f}")


def _at(bursts: Sequence[Burst], place: int) -> float:
    """The median processor time until the first token of the stream in that place."""
    return statistics.median([burst.firsts[place] for burst in bursts])


if __name__ == "__main__":
    main()
