"""`baton audit verify` as a command: what it reads, refuses and says."""

import json
import re
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.audit.tampers import SIGNER, Subject
from tests.cli.test_commands import baton

MISTYPED = (
    ("events", "body", "CAST('x' AS TEXT)", "text"),
    ("log_leaves", "entry", "CAST('{}' AS TEXT)", "text"),
    ("runs", "created_at", "'yesterday'", "text"),
    ("keys", "name", "x'00ff'", "blob"),
    ("runs", "degraded", "2", "number other than 0 and 1"),
)


@pytest.fixture
def data(subject: Subject, tmp_path: Path) -> Path:
    """A data folder with a copy of the database, and the last checkpoint in a file."""
    (tmp_path / "data").mkdir()
    shutil.copy(subject.url.removeprefix("sqlite:///"), tmp_path / "data" / "baton.db")
    checkpoint = subject.checkpoints[-1][1]
    (tmp_path / "held.txt").write_text(sign_note(checkpoint.text))
    return tmp_path


def sign_note(body: str) -> str:
    return f"{body}\n{SIGNER.signature(body)}"


@pytest.mark.parametrize(("table", "column", "value", "kind"), MISTYPED)
def test_a_value_of_another_type_is_named_and_ends_nothing_with_a_traceback(
    data: Path, table: str, column: str, value: str, kind: str
) -> None:
    with closing(sqlite3.connect(data / "data" / "baton.db")) as written, written:
        for (trigger,) in written.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            written.execute(f"DROP TRIGGER {trigger}")
        written.execute(f"UPDATE {table} SET {column} = {value}")
    result = baton(data, "audit", "verify", "--settled")
    assert (result.status, result.err.count("Traceback")) == (1, 0)
    words = f"its column `{column}` has a value of the type {kind}"
    assert words in result.out
    assert f"{table} " in result.out
    checked = baton(data, "audit", "check")
    assert (checked.status, checked.err.count("Traceback")) == (1, 0)
    assert words in checked.out
    exported = baton(data, "audit", "export", str(data / "journal.jsonl"))
    assert (exported.status in (0, 2), exported.err.count("Traceback")) == (True, 0)
    one = baton(data, "audit", "check", "--run", "run_kept")
    assert (words in one.out, one.err.count("Traceback")) == (table in ("runs", "events"), 0)


def test_the_command_verifies_a_database_and_saved_tiles(data: Path) -> None:
    checkpoint_file, key = str(data / "held.txt"), str(SIGNER.verifier)
    result = baton(data, "audit", "verify", "--checkpoint", checkpoint_file, "--key", key, "--settled")
    assert (result.status, result.err.count("Traceback")) == (0, 0), result.out + result.err
    assert "Nothing that was sealed is altered or missing." in result.out
    assert baton(data, "audit", "tiles", str(data / "tiles")).status == 0
    offline = baton(data, "audit", "verify", str(data / "tiles"), "--checkpoint", checkpoint_file, "--json")
    report = json.loads(offline.out)
    assert (offline.status, report["clean"], report["checkpoints"]) == (0, True, 1)
    exported = str(data / "journal.jsonl")
    assert baton(data, "audit", "export", exported).status == 0
    with_journal = baton(data, "audit", "verify", str(data / "tiles"), "--journal", exported, "--json")
    assert (with_journal.status, json.loads(with_journal.out)["runs"]) == (0, 3)
    assert "Of the file, the events of runs were compared." in with_journal.out
    lines = Path(exported).read_text()

    def verify_file(text: str, *options: str) -> str | None:
        """The rule of the first finding about an export of this text."""
        Path(exported).write_text(text)
        words = ("--journal", exported, "--json", *options)
        first = json.loads(baton(data, "audit", "verify", str(data / "tiles"), *words).out)["first"]
        return first["rule"] if first else None

    assert verify_file(lines, "--settled") is None
    assert verify_file(lines.replace("not cleared for phi", "not in the pool")) == "altered"
    last = re.findall(r'{"event":3,.*\n', lines)[-1]
    cut_off = lines.replace(last, "")
    at_once = re.sub(r'"at":[0-9.]+}', f'"at":{json.loads(last)["at"]}}}', cut_off, count=1)
    assert verify_file(at_once) is None  # what was sealed in the last moments may be missing
    assert verify_file(cut_off, "--settled") == "missing"
    for later in ("4000000000.0", "1e300"):  # in 2096, and in no calendar
        assert verify_file(re.sub(r'"at":[0-9.]+}', f'"at":{later}}}', cut_off, count=1)) == "missing"
    invented = last.replace('"event":3', '"event":4')
    assert verify_file(lines.replace(last, last + invented)) == "surplus"


def test_a_run_that_was_taken_out_of_an_export_or_put_into_it_is_found(data: Path) -> None:
    """Of an export of everything; one of a part says so, and one of an earlier release does not say which it is."""
    exported, tiles = data / "journal.jsonl", str(data / "tiles")
    assert baton(data, "audit", "tiles", tiles).status == 0
    assert baton(data, "audit", "export", str(exported)).status == 0
    text = exported.read_text()
    blocks = re.findall(r'{"run":.*\n(?:{"(?:event|content|ticket|disclosure|rating)":.*\n)*', text)
    (pruned,) = re.findall(r'{"pruned":.*\n', text)
    made_later = re.sub('"at":', '"at":9', text, count=1)
    newest = max(map(float, re.findall(r'^{"event":.*"at":([0-9.]+)', text, re.MULTILINE)))
    made_at_once = re.sub(r'"at":[0-9.]+', f'"at":{newest}', text, count=1)

    def verify_file(text: str, *options: str) -> tuple[int, str]:
        runs = len(re.findall(r'^{"run":', text, re.MULTILINE))
        exported.write_text(re.sub(r'{"end":\d+}', f'{{"end":{runs}}}', text))
        result = baton(data, "audit", "verify", tiles, "--journal", str(exported), *options)
        return result.status, result.out

    for removed in (blocks[0], pruned):
        for file, options in ((text, ("--settled",)), (made_later, ())):
            status, out = verify_file(file.replace(removed, ""), *options)
            assert (status, "it was sealed; the file neither has it" in out) == (1, True)
        assert verify_file(made_at_once.replace(removed, ""))[0] == 0  # what was just sealed may be missing
    made_earlier = re.sub(r'"at":[0-9.]+', f'"at":{newest - 1_000}', text, count=1)
    assert "after the time at which the file says" in verify_file(made_earlier.replace(blocks[0], ""))[1]
    a_part = made_later.replace('"whole":true', '"whole":false').replace(blocks[0], "")
    status, out = verify_file(a_part)
    assert (status, "1 runs of the log are not in the file, which says that it has not all" in out) == (0, True)
    of_before = made_later.replace('"whole":true,', "").replace(blocks[0], "")
    status, out = verify_file(of_before)
    assert (status, "which does not say whether it has all" in out) == (0, True)
    assert verify_file(of_before, "--settled")[0] == 1
    new = re.sub(r"run_[a-z]+", "run_new", blocks[0])
    assert verify_file(text.replace(blocks[0], blocks[0] + new))[0] == 1
    just_now = re.sub(r'"at":[0-9.]+', f'"at":{time.time()}', new)
    assert verify_file(text.replace(blocks[0], blocks[0] + just_now))[0] == 0  # written after the tiles were saved
    assert verify_file(text.replace(blocks[0], blocks[0] + just_now), "--settled")[0] == 1
    went_on = re.sub(r'"events":(\d+)', lambda said: f'"events":{int(said[1]) + 1}', pruned)
    assert verify_file(text.replace(pruned, went_on))[0] == 1
    pruned_since = re.sub(r'"ended_at":[0-9.]+', f'"ended_at":{time.time()}', went_on)
    assert verify_file(text.replace(pruned, pruned_since))[0] == 0
    assert verify_file(text.replace(pruned, pruned_since), "--settled")[0] == 1
    of_the_future = re.sub(r'"at":[0-9.]+', f'"at":{time.time() + 3600}', new)
    assert verify_file(text.replace(blocks[0], blocks[0] + of_the_future))[0] == 1


def test_an_altered_bundle_is_named_offline(data: Path) -> None:
    folder = data / "tiles"
    assert baton(data, "audit", "tiles", str(folder)).status == 0
    (bundle,) = [path for path in (folder / "tile" / "entries").rglob("*") if path.is_file()]
    body = bundle.read_bytes()
    bundle.write_bytes(body.replace(b'"id":"key1"', b'"id":"key9"'))
    result = baton(data, "audit", "verify", str(folder), "--checkpoint", str(data / "held.txt"))
    assert result.status == 1
    assert "The first bad place: the log (entry" in result.out


def test_saved_tiles_without_hashes_lack_them_and_are_not_called_altered(data: Path) -> None:
    folder = data / "tiles"
    assert baton(data, "audit", "tiles", str(folder)).status == 0
    shutil.rmtree(folder / "tile" / "0")
    result = baton(data, "audit", "verify", str(folder), "--checkpoint", str(data / "held.txt"), "--json")
    report = json.loads(result.out)
    assert (result.status, report["rules"]) == (1, {"tile": 1})
    last = report["entries"] - 1
    assert report["first"]["words"] == f"the hashes of the entries 0 to {last} are missing in its tiles"


def test_a_wrong_key_and_a_missing_log_are_told_apart(data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = "log.example/baton+00000000+AQOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4"
    assert baton(data, "audit", "verify", "--key", other).status == 2
    empty = tmp_path_factory.mktemp("empty")
    assert baton(empty, "migrate").status == 0
    result = baton(empty, "audit", "verify")
    assert result.status == 2
    assert "Nothing was sealed" in result.err
    emptied = baton(empty, "audit", "verify", "--checkpoint", str(data / "held.txt"))
    assert emptied.status == 1, emptied.err
    assert "it was cut off or set back" in emptied.out


def test_an_option_with_which_nothing_would_be_compared_is_refused(data: Path) -> None:
    folder, file = data / "unmounted", data / "cut-off.pub"
    folder.mkdir()
    file.write_text("")
    large = folder.with_name("large.txt")
    large.write_text("x" * 70_000)
    held = ("--checkpoint", str(data / "held.txt"))
    for options, words in (
        (("--checkpoint", str(folder)), "has no checkpoint"),
        (("--checkpoint", str(large)), "larger than a checkpoint"),
        (("--key", str(file)), "has no key"),
        ((*held, "--witness", str(file)), "has no key"),
        (("--journal", str(file)), "needs the folder of saved tiles"),
        (("--saved", str(folder)), "has no entries of a log"),
    ):
        result = baton(data, "audit", "verify", *options)
        assert (result.status, result.out) == (2, ""), options
        assert words in result.err


def test_a_checkpoint_of_more_entries_than_a_log_can_have_cannot_be_read(data: Path) -> None:
    (data / "held.txt").write_text(sign_note(f"log.example\n{'9' * 5_000}\n{'A' * 43}=\n"))
    result = baton(data, "audit", "verify", "--checkpoint", str(data / "held.txt"))
    assert (result.status, result.err.count("Traceback")) == (2, 0)
    assert "A checkpoint has an origin, a size and a root" in result.err
