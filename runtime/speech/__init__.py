"""Files of sound to a model's spectrograms, and its tokens to timed texts."""
