"""GGUF files: their container, their blocks of numbers, and what they hold as a model directory."""
