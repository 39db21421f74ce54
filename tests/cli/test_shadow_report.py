"""`baton shadow report` where nothing is known yet; tests/engine/test_shadows.py has its figures."""

import json
from pathlib import Path

import pytest

from app.__main__ import main
from tests.audit.test_command import reader_left
from tests.process.test_config import GOOD, write_pool

TRIED = '\n[tiers.tried]\npool = ["small"]\nshadow = "large"\n[tiers.tried.promotion]\nmin_pairs = 2\n'

pytestmark = pytest.mark.usefixtures("embedded_database")


def test_nothing_is_known_without_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = write_pool(tmp_path, GOOD + TRIED) | {"BATON_DATA_DIR": str(tmp_path)}
    arguments = ["shadow", "report", "tried"]
    assert main(arguments, environ) == 0
    output = capsys.readouterr().out
    assert "worker large: 0 pairs" in output
    assert "Nothing is known yet" in output
    assert main([*arguments, "--gate", "--json"], environ) == 1
    (candidate,) = json.loads(capsys.readouterr().out)["candidates"]
    assert (candidate["pairs"], candidate["promotable"], candidate["conditions"][0]["outcome"]) == (0, False, "open")
    with reader_left():
        assert main([*arguments, "--gate"], environ) == 1
    assert main(["shadow", "report", "gone"], environ) == 2
    assert "there is no such tier" in capsys.readouterr().err
