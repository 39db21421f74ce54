"""The command line: a room for each group of commands, and `commands/`, which reads the whole command line.

In each room `commands.py` declares commands with their options and names the module that runs each of them by
`run(args, environ, now) -> exit status`. `commands.py` imports nothing heavy, and `app/__main__.py` loads only the one
module that is asked for, so that `baton --version` and the containers' health probe cost milliseconds.
"""
