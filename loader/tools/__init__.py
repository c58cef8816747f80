"""`teneral pack`, `unpack`, `verify` and `inspect`."""
