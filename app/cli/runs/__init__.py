"""Commands that list, show, stop, repeat and sum up runs."""
