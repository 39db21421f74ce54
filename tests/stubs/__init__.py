"""A stub of the paid providers: their published wire formats, scripted faults, and a record of all that was sent.

It exists so that every test of Baton can talk to "the providers" over a real socket, be refused for what the
real ones refuse, and assert on the exact bytes. `server.py` is the entry; `script.py` is the vocabulary of behaviours.
"""

from .record import ReceivedRequest
from .script import (
    Agent,
    Behaviour,
    Drop,
    DuplicateFinish,
    Echo,
    Fail,
    Garbage,
    Hang,
    HugeLine,
    Raw,
    Reply,
    Reset,
    Stall,
    StreamError,
    ToolCall,
    Trickle,
    Truncate,
    Usage,
    WrongSchema,
    plan_reply,
)
from .server import KEYS, ProviderStub

__all__ = [
    "KEYS",
    "Agent",
    "Behaviour",
    "Drop",
    "DuplicateFinish",
    "Echo",
    "Fail",
    "Garbage",
    "Hang",
    "HugeLine",
    "ProviderStub",
    "Raw",
    "ReceivedRequest",
    "Reply",
    "Reset",
    "Stall",
    "StreamError",
    "ToolCall",
    "Trickle",
    "Truncate",
    "Usage",
    "WrongSchema",
    "plan_reply",
]
