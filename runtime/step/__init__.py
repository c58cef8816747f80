"""The data types of a step: batches, rows, requests, sampling, and the `Backend` protocol. Imports
no backend.
"""
