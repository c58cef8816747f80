"""Memory: its limits, the weights' arena, staging for bytes in flight, and locks for refining
weights in use.
"""
