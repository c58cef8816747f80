"""One instance: model code, engine, scheduler, KV pool, tokenizer, configuration. Knows no
platform.
"""
