"""Anthropic's Messages API, from a body to the engine and back."""
