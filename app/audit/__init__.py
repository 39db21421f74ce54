"""The offline auditor, which checks a journal against Baton's promises.

It shares no code with the engine that wrote the journal. `account.py` sorts a run's events into plans, calls and ends.
Each module of rules (`lifecycle`, `plans`, `spoken`, `steps`, `tooling`, `calls`, `money`, `row`, `contents`,
`requests`, `versions`) has a function from that account to its violations. `recompose.py` makes every provider request
again from the stored contents; a new part of a request must be added there. `check.py` is the entry point, and
`report.py` lists the rules by name.
"""
