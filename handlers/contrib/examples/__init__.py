"""Example handlers, to use unchanged or to copy. Each docstring has its command line."""
