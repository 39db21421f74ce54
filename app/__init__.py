"""Baton: one OpenAI-compatible endpoint in front of a conducted pool of models."""
