"""Teneral inside of other frameworks; each needs an extra."""
