"""The OpenAPI document of a server's routes and of a pool's, which is also the reference page of HTTP."""
