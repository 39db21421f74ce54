"""What all drives of the Python client share: the question, and how their reports write usage and errors."""

from typing import Any, Final

import openai
from openai.types import CompletionUsage

Report = dict[str, Any]
MESSAGES: Final[Any] = [{"role": "user", "content": "What is 2 + 2?"}]


def usage(counted: CompletionUsage | None) -> Report | None:
    """As plain values, our own fields included."""
    return counted.model_dump(exclude_unset=True) if counted is not None else None


def told(error: openai.APIError) -> Report:
    """The client's class, and what it read of the error object."""
    status = error.status_code if isinstance(error, openai.APIStatusError) else None
    return {
        "class": type(error).__name__,
        "status": status,
        "type": error.type,
        "code": error.code,
        "param": error.param,
        "request": bool(error.request_id) if isinstance(error, openai.APIStatusError) else None,
    }
