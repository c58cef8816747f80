"""Models of the Hugging Face Hub, as a source."""
