"""Engines seal what was committed, and say so when one of them has another key of the log."""

import asyncio
from pathlib import Path

import pytest

from app.core.transparency.notes import Signer
from app.engine.sealer import Sealer
from tests.harness.in_process import pool_text, running_service
from tests.stubs import ProviderStub


async def test_engines_with_different_keys_of_the_log_say_so_once(
    stub: ProviderStub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    signers = [Signer("log.example/baton", bytes(range(first, first + 32))) for first in (0, 1)]
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        engines = [Sealer(runtime.context, [signer]) for signer in signers]
        warnings = []
        for _ in range(4):
            for engine in engines:
                await engine.look(asyncio.Event())
            warnings.append(len([record for record in caplog.records if "different keys" in record.getMessage()]))
    assert warnings == [0, 1, 2, 2], "each engine finds the other's keys in its own place for the second time"
