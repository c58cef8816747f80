"""Deployments: what a platform needs to start containers, rendered from one pool.toml."""
