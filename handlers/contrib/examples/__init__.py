"""Worked examples: handlers to use as they are, or to copy. Each says in its docstring how it is run."""
