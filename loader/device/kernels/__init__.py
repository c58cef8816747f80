"""The devices' kernels: sources, and where compiled ones are kept."""
