"""The platforms, APIs and commands around the runtime: one platform, one file."""
