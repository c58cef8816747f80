"""How good is a draft: `teneral eval-draft` (docs/draft-quality.md)."""
