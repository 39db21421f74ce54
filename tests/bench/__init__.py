"""The bench: the budgets of DESIGN.md, section 10, measured on the machine at hand.

`python -m tests.bench` prints the table, and `python -m tests.bench --against PATH` compares two checkouts; the
docstring of `__main__` explains how a ratio is measured on a machine that others use. `upstream` plays the workers,
`load` the callers, `bare` is the reference that does nothing but pass through, `subject` starts Baton, `scenarios` has
one function per figure, `figures` lists them by set-up, `commits` counts transactions and `processes` reads CPU and
memory, both from outside. `python -m tests.bench.path` prints how much of the code one request enters.
"""
