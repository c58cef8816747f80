"""Batch jobs: a file of requests becomes a file of answers, each of which is there exactly once."""
