"""A process of the service, from its start to its end: settings, wiring, clock, and what serves."""
