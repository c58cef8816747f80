"""The vocabulary of a step: batches, rows, requests, sampling, and what a backend is. Imports no way to compute."""
