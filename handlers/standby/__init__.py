"""Processes that have imported everything and hold no model, and serve one when it is handed to them."""
