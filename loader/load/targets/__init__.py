"""The targets of a load's values: memory of this process, files that are used in place, another device."""
