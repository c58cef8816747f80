"""AWS Lambda: a client of its Runtime API, and the life of an instance there."""
