"""AWS Lambda: a client of its Runtime API, and what an instance does there."""
