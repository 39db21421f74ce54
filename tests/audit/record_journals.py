"""Records journals of this release as fixtures, which every later release must fold: `tests/core/journals/<release>/`.

    python -m tests.audit.record_journals 0.3.0 [SCENE...]

Each file is one run of `scenes.py`, in JSON lines: first the run's row and what this release folds its journal into,
then its events, then its contents. `catalogs.jsonl` has the pools and `changes.jsonl` the changes of the conductor.
"""

import asyncio
import base64
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from msgspec.structs import asdict

from app.core.run.events import Event, Kind
from app.core.run.fold import advance, begin
from app.store.archive import Record
from tests.audit.scenes import play
from tests.core.journals import FOLDER, summary


def encode_bytes(value: Any) -> dict[str, str]:
    """A value that JSON does not have."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    raise TypeError(type(value).__name__)


def lines(record: Record) -> list[Mapping[str, Any]]:
    """The lines of one run's file."""
    events = [
        Event(record.row["id"], event.seq, Kind(event.kind), event.at, orjson.loads(event.body))
        for event in record.events
    ]
    states = [begin(events[0])]
    for event in events[1:]:
        states.append(advance(states[-1], event))
    header = {
        "row": dict(record.row),
        "tickets": [dict(ticket) for ticket in record.tickets],
        "states": [state.state for state in states],
        "summary": summary(states[-1]),
    }
    rows = [{"seq": event.seq, "kind": event.kind.value, "at": event.at, "body": event.body} for event in events]
    contents = [{"ref": ref, "content": body} for ref, body in sorted(record.contents.items())]
    return [header, *rows, *contents]


def write(path: Path, rows: list[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row, default=encode_bytes) + "\n" for row in rows))


def main(release: str, scenes: Sequence[str]) -> None:
    """Play all scenes and write them, or only those that are named."""
    folder = FOLDER / release
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        journal = asyncio.run(play(Path(place)))
        chosen = {name: record for name, record in journal.runs.items() if not scenes or name in scenes}
        for name, record in chosen.items():
            write(folder / f"{name}.jsonl", lines(record))
        write(folder / "catalogs.jsonl", [{"digest": key, "content": body} for key, body in journal.catalogs.items()])
        write(folder / "changes.jsonl", [asdict(change) for change in journal.changes])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
