"""Teneral: a serverless inference runtime that answers while its weights are still arriving."""

__version__ = "0.1.0"
