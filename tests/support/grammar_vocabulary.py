"""A vocabulary of bytes, over which grammars accept texts and allow random ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from teneral.runtime.errors import GrammarError
from teneral.runtime.grammar.compiler import GrammarCompiler
from teneral.runtime.grammar.spec import GrammarSpec


class Vocabulary:
    """Bytes, some texts that are one token each, and the token that ends an answer."""

    def __init__(self, texts: Sequence[str] = (), *, end: str = "<|end|>", special: bool = False) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer = Tokenizer(
            models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
        )
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens([AddedToken(end, special=True)])
        added = [AddedToken(text, special=special) for text in texts]
        if special:
            self.tokenizer.add_special_tokens(added)
        else:
            self.tokenizer.add_tokens(added)
        self.end: int = self.tokenizer.token_to_id(end)
        self.compiler = GrammarCompiler(lambda: self.tokenizer.to_str().encode(), [self.end])

    def accepts(self, spec: GrammarSpec, text: str) -> bool:
        """True if the grammar accepts the whole text."""
        matcher = self.compiler.compile(spec).start()
        try:
            for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
                matcher.accept(token)
            if not matcher.is_finished:
                matcher.accept(self.end)
        except GrammarError:
            return False
        return True

    def sample(self, spec: GrammarSpec, seed: int, max_tokens: int = 600) -> str | None:
        """An answer of random tokens that the grammar allows; None: it did not end."""
        random = np.random.default_rng(seed)
        matcher = self.compiler.compile(spec).start()
        tokens: list[int] = []
        while not matcher.is_finished and len(tokens) < max_tokens:
            words = np.zeros(matcher.num_mask_words, dtype=np.uint32)
            matcher.mask_into(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            token = self.end if self.end in allowed and random.random() < 0.5 else int(random.choice(allowed))
            if token == self.end:
                break
            matcher.accept(token)
            tokens.append(token)
        else:
            if not matcher.is_finished:
                return None
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))
