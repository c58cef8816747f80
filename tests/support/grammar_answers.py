"""Answers that a compiled grammar accepts, random ones that it allows, and a schema for them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from tests.support.instances import TinyParts

from teneral.runtime.errors import GrammarError
from teneral.runtime.grammar.compiler import CompiledGrammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "bird"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
}


def accepts(parts: TinyParts, grammar: CompiledGrammar, text: str) -> bool:
    """True if the whole text is an answer of this grammar."""
    (eos, *_) = parts.tokenizer.eos_token_ids
    matcher = grammar.start()
    try:
        for token in parts.tokenizer.encode(text, add_special_tokens=False):
            matcher.accept(token)
    except GrammarError:
        return False
    words = np.zeros(matcher.num_mask_words, dtype=np.uint32)
    matcher.mask_into(words)
    return matcher.is_finished or bool(words[eos // 32] >> (eos % 32) & 1)


def random_answer(
    parts: TinyParts, grammar: CompiledGrammar, rng: random.Random, max_tokens: int
) -> str | None:
    """An answer that ended within this many tokens, by short tokens where there are any."""
    (eos, *_) = parts.tokenizer.eos_token_ids
    matcher = grammar.start()
    words = np.zeros(matcher.num_mask_words, dtype=np.uint32)
    tokens: list[int] = []
    for _ in range(max_tokens):
        matcher.mask_into(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        if matcher.is_finished or (eos in allowed and (len(allowed) == 1 or rng.random() < 0.4)):
            return parts.tokenizer.decode(tokens)
        allowed = [token for token in allowed if token != eos]
        closing = [token for token in allowed if parts.tokenizer.decode([token]) in ('"', "}", "]")]
        token = rng.choice(closing if closing and rng.random() < 0.3 else allowed)
        matcher.accept(token)
        tokens.append(token)
    return None
