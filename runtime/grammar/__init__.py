"""Structured output: a grammar as one value for every API, and its compiler, which wraps one
library.
"""
