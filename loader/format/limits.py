"""What is known of a folder before anything in it was read. Imports nothing: the manifest is asked for first of all."""

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
MAX_SMALL_FILE_BYTES = 256 * 1024 * 1024  # config.json, tokenizer.json, …
