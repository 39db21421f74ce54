"""Baton in a world of its own: virtual time, seeded chance, and faults at every seam.

A world is one seed. It runs the product's own drivers, dispatchers and store code in several "processes" inside one
event loop, breaks what can break, lets everything settle, and asks an oracle that knows nothing of the executor whether
every promise was kept. The same seed gives the same world.

    loop.py       time that jumps, machines that freeze and die          faults.py    what may go wrong, by name
    database.py   the real commit code over SQLite in memory             bell.py      a lossy queue
    workers.py    models that answer, err, hang and count                callers.py   who asks, and what they are told
    process.py    one process of the service                             world.py     all of it, and its end
    witness.py    every commit, as it happened                           oracle.py    whether the promises were kept
    zoo.py        bugs put in on purpose, which must be found
"""
