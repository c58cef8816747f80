"""Where the values of a load go: memory of this process, files that are used in place, another device."""
