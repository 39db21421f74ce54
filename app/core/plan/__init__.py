"""A plan: its parser, the workflow that it becomes, and what each step of it may see."""
