"""The KV cache: the allocator of blocks, the storage of keys and values, and the prefixes that can
be reused.
"""
