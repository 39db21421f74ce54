"""Every name that Baton uses in Redis.

name                          what             lives
{prefix}:2:steps:{tier}       stream           for ever: an empty one is small, and deleting it would delete its
{prefix}:2:runs:{tier}                         group; its entries live until `done` deletes them
  dispatchers                 consumer group   with its stream; made again, from the first entry, when missing
    {host}-{pid}-{chance}     consumer, one    until the process closes, or until it has been silent for
                              per process      `CONSUMER_SECONDS` with nothing pending, since a killed process
                                               cannot remove itself
{prefix}:2:live:{address}      channel          not stored at all
{prefix}:2:pulse              string           some seconds: what probes write, to see whether the server takes writes
"""

from typing import Final

from app.core.records import record

PROTOCOL: Final = 2
"""The number of what processes say to each other over Redis. Those of another number share only the database, so that
a rolling update needs no understanding between them; 0.1.0 had none."""
GROUP: Final = "dispatchers"
FIELD: Final = b"t"
"""The one field of a stream's entry."""
CONSUMER_SECONDS: Final = 3600


@record(frozen=True, slots=True)
class Keys:
    """The names under one prefix, so that several installations can share a server."""

    prefix: str

    def steps(self, tier: str) -> str:
        """The stream of a tier's steps."""
        return f"{self.prefix}:{PROTOCOL}:steps:{tier}"

    def runs(self, tier: str) -> str:
        """The stream of a tier's runs that nobody drives."""
        return f"{self.prefix}:{PROTOCOL}:runs:{tier}"

    @property
    def pulse(self) -> str:
        """Return the key that probes write."""
        return f"{self.prefix}:{PROTOCOL}:pulse"

    def live(self, address: str) -> str:
        """The channel of an address."""
        return f"{self.prefix}:{PROTOCOL}:live:{address}"
