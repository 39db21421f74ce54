"""Every name that Baton uses in Redis.

name                          what             lives
{prefix}:tickets:{tier}       stream           for ever: an empty one is small, and deleting it would delete its
                                               group; its entries live until `done` deletes them
  dispatchers                 consumer group   with its stream; made again, from the first entry, when missing
    {host}-{pid}-{chance}     consumer, one    until the process closes, or until it has been silent for
                              per process      `CONSUMER_SECONDS` with nothing pending, since a killed process
                                               cannot remove itself
{prefix}:live:{address}       channel          not stored at all
{prefix}:pulse                string           some seconds: what probes write, to see whether the server takes writes
"""

from typing import Final

from app.core.records import record

GROUP: Final = "dispatchers"
FIELD: Final = b"t"
"""The one field of a stream's entry."""
CONSUMER_SECONDS: Final = 3600


@record(frozen=True, slots=True)
class Keys:
    """The names under one prefix, so that several installations can share a server."""

    prefix: str

    def tickets(self, tier: str) -> str:
        """The stream of a tier."""
        return f"{self.prefix}:tickets:{tier}"

    @property
    def pulse(self) -> str:
        """Return the key that probes write."""
        return f"{self.prefix}:pulse"

    def live(self, address: str) -> str:
        """The channel of an address."""
        return f"{self.prefix}:live:{address}"
