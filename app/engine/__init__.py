"""The engine: it drives runs, executes their steps, calls providers, and delivers answers."""
