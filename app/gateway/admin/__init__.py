"""The admin API, on a listener of its own: keys, tenants, budgets, spend, workers, policy, conductors, changes."""
