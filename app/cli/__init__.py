"""The command line, one module for each command: `run(asked, environ, now) -> exit status`.

`commands/` knows every command and option and imports nothing heavy; `__main__.py` loads the one module that is asked
for, so that `baton --version` and the containers' health probe cost milliseconds.
"""
