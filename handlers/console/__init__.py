"""The console: one page at `/` that shows a server's start, its answers, its KV pool, its load and its artifact."""
