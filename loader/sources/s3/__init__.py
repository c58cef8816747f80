"""Amazon S3, and stores with its API: `s3://bucket/prefix`."""
