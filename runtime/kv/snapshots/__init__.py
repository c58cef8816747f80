"""The pool's blocks kept in a store: described, written and read, with distrust, by servers and by `teneral kv`."""
