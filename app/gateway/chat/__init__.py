"""The routes of `/v1/chat/completions` and `/v1/completions`, with their requests and replies."""
