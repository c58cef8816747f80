"""Names and size limits of a folder's files. Imports nothing, as the manifest is requested before
all else.
"""

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
MAX_SMALL_FILE_BYTES = 256 * 1024 * 1024  # config.json, tokenizer.json, …
