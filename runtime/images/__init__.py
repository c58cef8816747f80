"""Images of requests: files to pixels, and pixels to the tiles and the text that a model takes."""
