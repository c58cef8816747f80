"""User functions: what they are given, and how they are called."""
