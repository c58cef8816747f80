"""The quality of drafts: `teneral eval-draft` (docs/draft-quality.md)."""
