"""Baton in a world of its own: virtual time, seeded chance, and faults at every seam.

A world is one seed. It runs the product's own drivers, dispatchers and store code in several "processes" inside one
event loop, breaks what can break, lets everything settle, and asks judges that know nothing of the executor whether
every promise was kept. The same seed gives the same world: `python -m tests.simulation SEED` tells its story, `make
simulate` plays ten thousand.

    the world   world.py      all of it, from its start to its rest      loop.py      time that jumps, machines that die
                process.py    one process of the service                 faults.py    what may go wrong, by name
                callers.py    who asks, and what they are told           seam.py      where it goes wrong
                workers.py    models that answer, err, hang and count    plans.py     what their conductor proposes
                receiver.py   who is told of ends by webhook       operators.py  pool files, and who decides on plans
                database.py   the real store code over SQLite            bell.py      a queue that loses and doubles
                stage.py      what keeps a world to itself
    the judges  witness.py    every commit, as it happened               oracle.py    whether the promises were kept
                audited.py    the product's own auditor                  case.py      the evidence about one run
                sight.py      what each call was shown             approved.py  what approvals and pool files promise
    playing     play.py       one seed                                   crowd.py     many seeds, on all cores
                report.py     what came of one
    the zoo     zoo.py        bugs put in on purpose, which must be found
                handing.py    those in how runs go from one process to another
                deciding.py   those in decisions on plans, and in pool files that are read again
"""
