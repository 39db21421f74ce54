"""One adapter for each wire format; adapters do not import each other. See `providers/protocol.py` and `formats.py`."""
