"""Folders of the local file system: a path, or `file:///folder`."""
