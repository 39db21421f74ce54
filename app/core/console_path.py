"""The path of the console, and which addresses are its pages; for the console and for the login that leads to it."""

from typing import Final

PATH: Final = "/console"


def restrict_to_console(path: str) -> str:
    """Return the address to go on to: a page of the console. For any other one, such as that of another site, that is
    the console's start."""
    is_ours = path == PATH or path.startswith((f"{PATH}/", f"{PATH}?"))
    if is_ours and "\\" not in path and not any(ord(char) < 33 for char in path):
        return path
    return PATH
