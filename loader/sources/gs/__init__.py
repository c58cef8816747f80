"""Google Cloud Storage: `gs://bucket/prefix`."""
