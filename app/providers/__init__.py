"""Provider adapters: one file per wire format, over one HTTP transport. `protocol.py` is the seam."""
