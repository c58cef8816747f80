"""Processes and processor time: helper processes, and work spread over a few threads."""
