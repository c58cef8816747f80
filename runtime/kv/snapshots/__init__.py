"""Snapshots of the pool's blocks in a store: their format, reader and writer, for servers and
`teneral kv`. Input is untrusted.
"""
