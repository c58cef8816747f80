"""The CUDA driver: memory, streams, events, modules, launches and graphs of one device."""
