"""JSON schemas in the keywords that the grammar library enforces."""
