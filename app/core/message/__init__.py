"""Messages: tasks, answers, tool calls and response formats, free of any wire format."""
