"""Official clients drive a running service.

A *drive* is what a user's program does on one surface (chat, models, errors, ...), and ends in a report of plain JSON
values. The same drive exists for each client, and all reports must be what the test says. To add a surface: a function
of its name in `sync_drives.py` and in `async_drives.py`, a program `node/NAME.mjs`, and a test in a file of its own
that takes `driven("NAME")`.
"""
