"""`teneral pool render`: one pool.toml as complete documents of each platform."""
