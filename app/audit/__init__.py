"""The offline auditor: does a journal keep what Baton promises?

It shares no code with what wrote the journal. `account.py` sorts a run's events into what was planned, called and
ended; each rule (`lifecycle`, `plans`, `spoken`, `steps`, `tooling`, `calls`, `money`, `row`, `contents`, `requests`,
`versions`) is a function from that account to what contradicts it; `recompose.py` makes every provider request again
from the stored contents, and is the one place to teach about a new part of a request.
`check.py` is the way in, and `report.py` lists the rules by name.
"""
