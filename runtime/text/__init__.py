"""Text and tokens: the tokenizer, chat templates, incremental detokenisation, stop strings."""
