"""The journals of an installation in which something went wrong, kept for who wants to know what happened."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.harness.processes import run_command

EXPORT_SECONDS = 120.0


def keep_journals(folder: Path, environ: Mapping[str, str], database: str, name: str) -> str:
    """Export all journals of a database into the folder, which pytest keeps for a failed test, and return a sentence
    that says where they are."""
    file_name = re.sub(r"[^\w.-]+", "_", name)
    path = folder / f"{file_name}.jsonl"
    settings = {**environ, "BATON_DATABASE_URL": database}
    exported = run_command(folder, settings, "audit", "export", str(path), within=EXPORT_SECONDS)
    if exported.returncode:
        return f"The journals could not be exported: {exported.stderr}"
    return f"The journals are in {path}."


@contextmanager
def journals_kept_on_failure(folder: Path, environ: Mapping[str, str], database: str) -> Iterator[None]:
    """Keep the journals if the block fails, and note where with the error."""
    try:
        yield
    except Exception as error:
        error.add_note(keep_journals(folder, environ, database, "journals"))
        raise
