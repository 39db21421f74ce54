"""Names of tools for workers, some of which take 64 characters at most."""

import hashlib
from typing import Final

NAME_LENGTH: Final = 64


def short_name(name: str) -> str:
    """Return the name of a tool for workers, which depends on its own name alone."""
    if len(name) <= NAME_LENGTH:
        return name
    return f"{name[: NAME_LENGTH - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
