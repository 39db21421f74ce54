"""Checks of the transparency log, and of the database against it, by code that shares nothing with what writes them."""
