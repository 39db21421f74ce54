"""The HTTP client of the service, and the policies of retries that are not journaled."""
