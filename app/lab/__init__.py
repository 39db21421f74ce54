"""Learning: rehearsal worlds, what a plan is worth in them, honest baselines, and the training of a conductor.

families ... checkable tasks in plain language, written and read back by the same templates
world ...... workers with hidden skill, price and pace; pools drawn at random
plans ...... the grammar of plans, as tokens, as JSON and as a core workflow; plans without what cannot help
outcome .... the exact expectation of a plan, and what it costs
actors ..... the same workers as they answer messages, for the real executor
provider ... those workers behind the provider seam, for the whole service
search ..... every plan that could be best; baselines ... what a trained conductor is held against
reward ..... malformed < wrong < right, with cost gated on being right
offpolicy .. what another policy would have earned, from decisions logged with their probabilities
decisions .. what a journal tells of decisions that were left to chance
rollouts ... journaled runs in the shape that training reads (journaled makes them of the journal)
questions .. what a chat model is asked, before which pool
carried .... its plans, carried out by a running Baton; scoring ... their reward
record ..... curve and card of a training run
train_* .... with export and tensors, the only modules that import torch
"""
