"""The number and the seed of the fuzzers' cases, and what must be true of every reply."""

import json
import os
from typing import Any, Final

CASES: Final = int(os.environ.get("BATON_TEST_FUZZ", "1000"))
"""A thousand in CI, and as many as asked for by `make fuzz`."""
SEED: Final = int(os.environ.get("BATON_TEST_FUZZ_SEED", "0"))
"""The seed of all that is drawn: the same seed, with as many cases and the same code, draws the same requests."""
LARGEST_ERROR: Final = 4_096


def check_error(status: int, body: bytes, content_type: str) -> dict[str, Any]:
    """Fails unless this is a small refusal in OpenAI's shape that blames the caller."""
    assert 400 <= status < 500, (status, body[:500])
    assert content_type == "application/json"
    assert len(body) <= LARGEST_ERROR
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["code"], str)
    assert error["param"] is None or (isinstance(error["param"], str) and error["param"])
    return error
