"""Integrations with other frameworks; each needs an extra."""
