"""Low-rank adapters of a served decoder: PEFT's files, their load, and those in memory."""
