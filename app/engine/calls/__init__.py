"""Provider calls: who is called, with what, and what came back."""
