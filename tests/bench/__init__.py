"""The bench: the budgets of DESIGN.md, section 10, measured on the machine at hand.

`python -m tests.bench` prints the table. `upstream` plays the workers, `load` the callers, `bare` is the reference
that does nothing but pass through, `subject` starts Baton, `scenarios` has one function per figure, and `processes`
reads CPU and memory from outside.
"""
