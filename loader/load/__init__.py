"""A load: bytes from a source become verified values in memory, group by group, while others
already use them.
"""
