"""`python -m tests.stubs --port N`: the stub as a process of its own, for tests with several processes."""

from __future__ import annotations

import argparse
import asyncio

from .server import ProviderStub


async def _serve(port: int, any_key: bool) -> None:
    async with ProviderStub(port=port, any_key=any_key) as stub:
        print(stub.url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Serve until killed; the first line on stdout is the root URL."""
    parser = argparse.ArgumentParser(prog="python -m tests.stubs", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--any-key", action="store_true", help="accept any non-empty key")
    chosen = parser.parse_args()
    asyncio.run(_serve(chosen.port, chosen.any_key))


if __name__ == "__main__":
    main()
