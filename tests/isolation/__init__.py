"""Two tenants on one service, and whether anything of the one reaches the other."""
