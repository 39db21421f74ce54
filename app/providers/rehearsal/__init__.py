"""The rehearsal pool: simulated workers that really solve small families of checkable tasks, with hidden skills.

`provider` has the provider, `answering` how a worker answers, `planner` how the conductor plans, and
`question_families` the readers of questions in free words. `task_families` has the tasks that templates both write and
read: calibration, the built-in tasks of `baton eval` and the lab draw theirs from it. Both compute equations, sums and
dates by the same functions.
"""
