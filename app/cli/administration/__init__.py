"""Commands that manage keys, tenants, content keys, budgets and webhooks."""
