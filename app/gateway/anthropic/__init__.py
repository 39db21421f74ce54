"""The route of `/v1/messages`, with its requests and replies."""
