"""The lab: what trains, simulates and evaluates. The service imports nothing of it; the command line does.

The simulated world
    task_families      checkable tasks in plain language, written and read back by the same templates
    world              workers with hidden skill, price and pace; pools drawn at random
    workers            the answers of these workers to a step's messages
    provider           these workers behind the provider seam, for the whole service
    plans              the grammar of plans: as tokens, as JSON, as a core workflow, and without useless steps
    outcome            the exact expected reward and cost of a plan
    search, baselines  every plan that could be best, and the plans that a trained conductor is compared with
    reward             malformed < wrong < right, where only a right answer is worth more for costing less
    world2             the second world, which is not easy: a room of its own
Data from journals
    rollouts           journaled runs in the shape that training reads; `journal_rollouts` reads them from a journal
    offpolicy          what another policy would have earned, from decisions logged with their probabilities
Recorded outcomes of real models
    recorded_outcomes  prompts with the scores of models, read from files of several formats
    replay             what the selector and `routing_baselines` would have earned on them
    simulated_selector the service's selector as simulations and replays drive it
Training
    training_questions the questions that a chat model is trained on, each before a pool
    plan_execution     the execution of its plans by a running Baton; `plan_rewards` scores them
    training_record    the curve and the card of a training run
    train_*            with `export` and `tokenizer` the only modules that import torch and Hugging Face's libraries
"""
