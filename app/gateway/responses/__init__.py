"""The routes of `/v1/responses`, with their requests, replies and stored items."""
