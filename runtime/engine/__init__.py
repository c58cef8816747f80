"""The engine: the step loop, sequences, the scheduler and block management; and the batching of
encoders.
"""
