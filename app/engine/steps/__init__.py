"""Steps: tickets are claimed, executed, and their outcomes written."""
