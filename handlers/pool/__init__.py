"""Warm pools: the file `pool.toml`, the scaling policy, and the supervisor that runs a pool on one machine."""
