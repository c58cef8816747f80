"""User functions: their inputs, and how they are run."""
