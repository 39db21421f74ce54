"""World 2: composed tasks, workers known by their cards alone, verdicts that err, and baselines that are hard to beat.

constants   every figure with its published range and its source, frozen by SHA-256
tasks       tasks composed of parts from families, in many words; splits that hold families and phrasings out
workers     worker profiles, their measured cards, and pools; splits that hold workers, pools and prices out
shapes      all plans that a policy can choose: shapes of at most four steps, with a worker for each step
outcome     the exact expected reward of plans, for all assignments of workers to a shape at once
execution   the same world as workers that read messages; every call has dice of its own
baselines   the policies to compare with; `texts`, `product_selector` and `evolution` are parts of it
learning    a policy that learns from one verdict an execution, by `gradients`
reading     the kinds of a task's parts and its confidence, from its words, with their chances; by `sentences`
model_free  policies that learn from the same number of verdicts without a model of workflows
bounds      the share of the gap that can be closed by what such a policy may know
words       a conductor that reads cards and tasks as the service sends them, and writes plans in words; needs torch
standings   seeds, clustered intervals and one table: `python -m app.lab.world2`
"""
