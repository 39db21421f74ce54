"""Commands that make plans, edit, execute and approve them."""
