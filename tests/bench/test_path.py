"""The counting of what a request enters, over a service of three files whose way to SQL is known."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from .path import merge_counts, of_every_round
from .tracer import Counts

PROVIDER = """
import asyncio

async def stream():
    for chunk in ("a", "b"):
        await asyncio.sleep(0)
        yield chunk
"""
STORE = """
import asyncio, sqlite3

class Store:
    def __init__(self):
        self.batch = asyncio.Queue()
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("CREATE TABLE t (x)")

    async def append(self, entry):
        written = self.put(entry)
        return await written

    def put(self, entry):
        written = asyncio.get_running_loop().create_future()
        self.batch.put_nowait((entry, written))
        return written

    async def run(self):
        while True:
            entry, written = await self.batch.get()
            self.write(entry)
            written.set_result(None)

    def write(self, entry):
        self.connection.execute("INSERT INTO t VALUES (?)", (entry,))
"""
ENGINE = """
import asyncio

async def step(stream, store):
    await store.append("call.intended")
    text = "".join([chunk async for chunk in stream()])
    await end(store, text)

async def end(store, text):
    await store.append("step.done")

def request(stream, make_store):
    async def both():
        store = make_store()
        writer = asyncio.get_running_loop().create_task(store.run())
        await step(stream, store)
        writer.cancel()
        store.connection.close()
    asyncio.run(both())
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str, str], ModuleType]:
    """Makes one module of a service in `tmp_path`."""

    def load_module(name: str, text: str) -> ModuleType:
        path = tmp_path / "app" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_module


def test_a_request_is_followed_from_the_steps_end_to_sql(
    tmp_path: Path, load: Callable[[str, str], ModuleType]
) -> None:
    engine, store = load("engine.py", ENGINE), load("store/sql.py", STORE)
    provider = load("providers/stub.py", PROVIDER)
    counts = Counts(str(tmp_path))
    counts.recording = True
    before = sys.getprofile()
    sys.setprofile(counts.profile)
    try:
        engine.request(provider.stream, store.Store)
    finally:
        sys.setprofile(before)
    names = [name.rpartition(":")[2] for name in counts.frames]
    assert names == ["end", "Store.append", "Store.run", "Store.write"], (
        "`put` has returned by then, `step` began before"
    )
    assert set(counts.files) == {
        str(tmp_path / "app" / part) for part in ("engine.py", "store/sql.py", "providers/stub.py")
    }
    entered = {code.co_name for code in counts.functions}
    assert entered == {"request", "both", "step", "end", "__init__", "append", "put", "run", "write", "stream"}
    assert counts.files.total() > 10


def test_counts_of_two_processes_are_added() -> None:
    first = {"files": {"a.py": 2, "b.py": 1}, "functions": ["a.py:f", "b.py:g"], "frames": []}
    second = {"files": {"b.py": 4}, "functions": ["b.py:g", "b.py:h"], "frames": ["b.py:h"]}
    both = merge_counts([first, second])
    assert (len(both.files), len(both.functions), both.switches, both.frames) == (2, 3, 7, ("b.py:h",))


def test_a_file_that_some_round_does_not_enter_is_background_work() -> None:
    first = merge_counts([{"files": {"a": 3, "sweep": 1}, "functions": ["a:f", "sweep:g"], "frames": ["a:f"]}])
    second = merge_counts([{"files": {"a": 5}, "functions": ["a:f"], "frames": ["a:f"]}])
    background_files = of_every_round([first, second])
    assert (background_files.files, background_files.functions, background_files.switches) == ({"a": 3}, {"a:f"}, 3)
