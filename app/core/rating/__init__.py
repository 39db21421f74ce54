"""Ratings: feedback on runs, and what a selector learns from it."""
