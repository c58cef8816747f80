"""Places that hold bytes: files, S3, HTTP, memory."""
