"""A certificate authority for the tests of this folder."""

import ssl
from typing import Any

import pytest
import trustme

from tests.harness.authority import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), trustme.CA())


@pytest.fixture(autouse=True)
def fresh_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere tests share one TLS context to save time; here each route loads its own files into its own."""
    shared: Any = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", shared.__wrapped__)
