"""Agent frameworks and other clients that nobody here wrote drive a running service: `make test-clients`.

They are no dependencies of Baton's, pin each other's versions, and so live in environments of their own. A program of
`drives/` does with one of them what its users do, on each route that it speaks, and prints a report in JSON; the tests
say what must stand in it. To add a client: a pin in a `.in` file, a program, a name in `test_frameworks.py`.
"""
