"""Translation between the outside and the runtime: one platform, one file."""
