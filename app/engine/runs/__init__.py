"""Runs: admission, planning, driving, tool results, and recovery after a process has died."""
