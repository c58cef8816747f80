"""The HTTP API: OpenAI-compatible routes, health, metrics, and the user's handler."""
