"""Standby processes: they have imported everything, hold no model, and serve one that is handed
over to them.
"""
