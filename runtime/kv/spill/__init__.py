"""Where blocks go before the pool gives them up: memory of the host, a local disk, and back."""
