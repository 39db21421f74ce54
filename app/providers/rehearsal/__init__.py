"""The rehearsal pool: simulated workers that really solve small families of checkable tasks, with hidden skills.

`provider.py` is the seam; `minds.py` how a worker answers, `planner.py` how the conductor plans; `families.py` lists
what can be solved, each kind by computation in a file of its own.
"""

from app.providers.rehearsal.provider import RehearsalProvider

__all__ = ["RehearsalProvider"]
