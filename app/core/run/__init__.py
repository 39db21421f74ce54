"""A run: its events, the state that they fold into, and what is to be done next."""
