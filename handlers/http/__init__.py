"""The HTTP face: OpenAI-compatible routes, health, metrics, and the user's handler."""
