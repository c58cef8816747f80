"""Azure Blob Storage: `az://account/container/prefix`."""
