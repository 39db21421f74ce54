"""The arguments of one command, as the modules of this package receive them."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any


class Arguments(SimpleNamespace):
    """The arguments and options of one command, as attributes.

    `module` is the module of this package that runs the command, `verb` is the command's own name, and `settings` has
    the settings that options such as `--port` replace, by the names of their environment variables. `given` has the
    options that stand on the command line, such as `--port`. `ends_with_reader` is True for
    a command that ends when nobody reads its output any more, as after `| head`; others are carried out to their end.
    """

    module: str
    verb: str
    settings: Mapping[str, str]
    given: frozenset[str]
    ends_with_reader: bool

    def start(self, now: float) -> float | None:
        """Return the time at which the period of `--since` begins, in seconds since 1970; None if none is given."""
        if self.since is None:
            return None
        return now - float(self.since)


def arguments(
    module: str, verb: str, options: Mapping[str, Any], *, given: frozenset[str], ends_with_reader: bool
) -> Arguments:
    """Return the arguments of one command. An option whose parameter is called `baton_...` replaces that setting."""
    variables: dict[str, str] = {}
    own: dict[str, Any] = {}
    for name, value in options.items():
        if not name.startswith("baton_"):
            own[name] = value
        elif value is not None:
            variables[name.upper()] = str(value)
    command = {"module": module, "verb": verb, "settings": variables}
    return Arguments(**command, given=given, ends_with_reader=ends_with_reader, **own)
