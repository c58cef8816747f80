"""vLLM with an artifact's weights: `vllm serve s3://bucket/model --load-format teneral` (docs/vllm.md)."""
