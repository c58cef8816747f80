"""The step loop and what it is asked: requests, sequences, the scheduler, sampling; and the encoder's batching."""
