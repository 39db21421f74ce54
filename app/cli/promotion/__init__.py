"""Commands that try a conductor, a tier or a worker, and put it in force."""
