"""The KV cache: who owns which block, where keys and values lie, and attention over them."""
