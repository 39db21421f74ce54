"""The API's own description, which FastAPI makes of its routes: models of replies, and declarations of routes."""
