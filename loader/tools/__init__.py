"""What `teneral pack`, `unpack`, `verify` and `inspect` do."""
