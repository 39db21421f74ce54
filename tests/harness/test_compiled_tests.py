"""pytest uses the files that were compiled before the tests."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

from tests.harness.compiled_tests import compile_as_pytest_does


def test_pytest_takes_what_was_compiled_until_the_file_is_changed(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_by_pytest: list[Path] = []
    rewrite_test = rewrite._rewrite_test

    def count_and_rewrite(path: Path, config: pytest.Config) -> tuple[bytes, object]:
        compiled_by_pytest.append(path)
        return rewrite_test(path, config)

    path = tmp_path / "test_sum.py"
    path.write_text("def test_sum():\n    assert 1 + 1 == 3\n")
    compile_as_pytest_does(path)
    monkeypatch.setattr(rewrite, "_rewrite_test", count_and_rewrite)
    with pytest.raises(AssertionError, match=r"assert \(1 \+ 1\) == 3"):
        _import(path, pytestconfig).test_sum()
    assert compiled_by_pytest == []
    path.write_text("def test_sum():\n    assert 1 + 2 == 3\n")
    _import(path, pytestconfig).test_sum()
    assert compiled_by_pytest == [path]


def _import(path: Path, config: pytest.Config) -> Any:
    """Import a file as pytest does."""
    spec = spec_from_file_location(path.stem, path, loader=rewrite.AssertionRewritingHook(config))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
