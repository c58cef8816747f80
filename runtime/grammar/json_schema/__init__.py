"""JSON schemas in the keywords that the grammar library enforces."""

MARK = "x-unique"  # the keyword of an array of unique items in a rewritten schema
