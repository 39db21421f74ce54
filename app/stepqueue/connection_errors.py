"""The exceptions of redis-py that mean that the server or the network between has failed."""

from typing import Final

from redis.exceptions import RedisError

FAULTS: Final = (RedisError, OSError, TimeoutError, RuntimeError)
"""RuntimeError is what uvloop says of a transport that was closed under its writer ("the handler is closed"); redis-py
lets it pass, and unless it is caught here it ends the process that merely wanted to say something."""
