"""The offline auditor, which checks a journal against Baton's promises.

It shares no code with the engine that wrote the journal. Start with `check.py`, the entry point. `audited_run.py` sorts
the events of a run into plans, steps, calls and ends. Each other module checks the rules of one subject: it has a
function `check_...` that takes this record of a run and yields violations. `report.py` lists all rules by name.

`request_rebuilding.py` makes every provider request again from the stored contents; a new part of a request must be
added there. `log/` checks the database against the signed transparency log.
"""
