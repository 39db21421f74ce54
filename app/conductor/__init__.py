"""Conductors: the policies that propose a workflow. `protocol.py` is the seam."""
