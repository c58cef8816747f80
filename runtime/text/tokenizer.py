"""The tokenizer of a model: text ↔ tokens, by the model's own files.

`tokenizer.json` defines it; the other files name the special tokens, the end tokens and the chat
template. This module knows nothing of the model, its context length or sampling, nor whether tokens
are made in this process or another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ContextLengthError, ModelError, RequestError
from .backend import MAX_TOKEN, SPECIAL, EncodedPair, LocalBackend, TokenizerBackend
from .chat import ChatTemplate, ChatWorker, Message
from .settings import Files, PairTemplate, TextSettings, read_tokenizer_file

if TYPE_CHECKING:
    from ..grammar.compiler import GrammarCompiler
    from ..grammar.matcher import Grammar
    from ..grammar.spec import GrammarSpec

# Tokenising this many takes up to 0.7 s, and superlinear time beyond.
MAX_TEXT_CHARS = 1 << 20


class TextTokenizer:
    """The tokenizer of one model. Thread-safe; other threads run while a long text is tokenised."""

    def __init__(
        self,
        backend: TokenizerBackend,
        settings: TextSettings,
        *,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Owns `backend` and `chat_template`, and closes them."""
        self._backend = backend
        self.special_tokens = settings.special_tokens
        self._has_token_types = settings.has_token_types
        self._pairs = settings.pairs
        self.images = settings.images  # None: the model reads text only
        self.speech = settings.speech  # None: it takes no sound
        self.chat_template = chat_template or make_chat_template(settings)
        self.vocab_size = backend.vocab_size
        own = backend.piece_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_token_ids = settings.eos_token_ids | (frozenset() if own is None else {own})
        self._grammars_lock = threading.Lock()
        self._grammars: GrammarCompiler | None = None  # until the first request with a grammar

    @classmethod
    def from_files(
        cls, files: Files, *, adjust: Callable[[TextSettings], TextSettings] = lambda settings: settings
    ) -> TextTokenizer:
        """Make a tokenizer in this process.

        `files` returns a file of the model directory by its name, None if there is none. `adjust`
        maps the model's settings, before the vocabulary is read, to those to use. Raises
        `ModelError` for missing or damaged files.
        """
        settings = adjust(TextSettings.read(files))
        chat_template = make_chat_template(settings)
        backend = LocalBackend.from_file(read_tokenizer_file(files), settings.special_tokens)
        return cls(backend, settings, chat_template=chat_template)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Encode the text, by default with the special tokens that the model adds around a text.

        Disable that for a result of `chat`: the template wrote them. Special tokens in the text are
        recognised. Raises `RequestError` for a text that is too long or is not Unicode, and
        `ContextLengthError` for one that cannot be encoded in `max_tokens`, before any work if the
        vocabulary has a bound.
        """
        num_bytes = _check_text(text)
        if max_tokens is not None:
            self._check_length(num_bytes, max_tokens)
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str | None]], *, instruction: str | None = None
    ) -> list[EncodedPair]:
        """Encode each pair of texts, or each single text, with the model's own template, special
        tokens included. All token types are 0 where transformers passes none to the model.

        `instruction` replaces that of a model whose chat template writes pairs. Raises `RequestError` for a
        text that is too long or is not Unicode, for an instruction that has no place, and the errors of `chat`.
        """
        for pair in pairs:
            for text in pair:
                if text is not None:
                    _check_text(text)
        if self._pairs is not None and all(second is not None for _, second in pairs):
            template = self._pairs if instruction is None else self._pairs._replace(instruction=instruction)
            return self._encode_written([(first, second or "") for first, second in pairs], template)
        if instruction is not None:
            raise RequestError(
                "the model has no template that takes an instruction",
                param="instruction",
                hint="Write it into the texts.",
            )
        encoded = self._backend.encode_pairs(pairs)
        if self._has_token_types:
            return encoded
        return [pair._replace(types=(0,) * len(pair.types)) for pair in encoded]

    def _encode_written(self, pairs: Sequence[tuple[str, str]], template: PairTemplate) -> list[EncodedPair]:
        """Pairs as the chat template writes them. What a text changes shows where it lies."""
        bare = self._write("", "", template)
        lone: dict[str, str] = {}  # a first text → what is written without a second one
        encoded = []
        for first, second in pairs:
            whole = self._write(first, second, template)
            if first not in lone:
                lone[first] = self._write(first, "", template)
            if second and whole == lone[first]:
                raise ModelError(
                    "the model's chat template leaves out messages of the role document",
                    hint="Serve it with --chat-template FILE.",
                )
            begin, end = _changed(whole, lone[first])
            first_begin, first_end = _changed(lone[first], bare)
            shift = len(whole) - len(lone[first]) if first_begin >= begin else 0
            tokens = self.encode(whole, add_special_tokens=False)
            parts = tuple(
                1
                if from_ < end and to > begin
                else 0
                if from_ < first_end + shift and to > first_begin + shift
                else SPECIAL
                for from_, to in self._backend.offsets(whole)
            )
            encoded.append(EncodedPair(tuple(tokens), (0,) * len(tokens), parts))
        return encoded

    def _write(self, first: str, second: str, template: PairTemplate) -> str:
        named = [("system", template.instruction), ("query", first), ("document", second)]
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if template.is_structured else text}
            for role, text in named
            if text is not None
        ]
        return self.chat_template.render(
            messages,
            add_generation_prompt=bool(template.variables.get("add_generation_prompt", False)),
            variables=template.variables,
            keeps_parts=template.is_structured,
        )

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The half-open range of the text's characters for each of its tokens, without special
        tokens.

        Tokens that share a character's bytes all have the range of the whole character. Raises the
        errors of `encode`.
        """
        _check_text(text)
        return self._backend.offsets(text)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode these tokens together; invalid UTF-8 becomes U+FFFD, unknown tokens become
        nothing.
        """
        return self._backend.decode(tokens, skip_special_tokens=skip_special_tokens)

    def id_to_piece(self, token: int) -> str | None:
        """The token in the vocabulary's spelling ("Ġhello", "<0x0A>"); None if there is none."""
        return self._backend.id_to_piece(token) if 0 <= token < MAX_TOKEN else None

    def piece_to_id(self, piece: str) -> int | None:
        return self._backend.piece_to_id(piece)

    def chat(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        keeps_parts: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt that the model's chat template renders from the messages, special tokens
        included as text.

        `variables` are passed to the template, such as `enable_thinking`; with `keeps_parts`, so are
        lists of texts and images. Blocks for about a
        millisecond; raises the errors of `ChatTemplate.render`.
        """
        return self.chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
            keeps_parts=keeps_parts,
        )

    @property
    def templates(self) -> Mapping[str, str]:
        """The chat templates by name; empty if the model has none."""
        return self.chat_template.templates

    def _check_length(self, num_bytes: int, max_tokens: int) -> None:
        most = self._backend.max_token_bytes
        if most is not None and num_bytes > max_tokens * most:
            raise ContextLengthError(
                f"the text has {num_bytes} bytes, at least {-(-num_bytes // most)} tokens, but there is room for "
                f"{max_tokens}",
                param="prompt",
                hint="Send less.",
            )

    @property
    def is_ready_for_grammars(self) -> bool:
        """False until the first grammar has been compiled, or its vocabulary prepared."""
        return self._grammars is not None and self._grammars.is_prepared

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        """Compile the grammar over this vocabulary. The first call takes up to a second and
        releases the GIL.

        Raises `GrammarError`, and `RequestError` if the tokenizer does not support grammars.
        """
        from ..grammar.compiler import GrammarCompiler  # of few requests

        with self._grammars_lock:
            self._grammars = self._grammars or GrammarCompiler(
                self._backend.tokenizer_json, self.eos_token_ids
            )
        return self._grammars.compile(spec)

    def close(self) -> None:
        """End the processes that tokenise and that render chat templates."""
        self.chat_template.close()
        self._backend.close()


def _changed(text: str, other: str) -> tuple[int, int]:
    """The half-open range of `text` that is not in `other`: what is between their common begin and end."""
    begin = _num_alike(text, other)
    most = min(len(text), len(other)) - begin
    return begin, len(text) - min(_num_alike(text[::-1], other[::-1]), most)


def _num_alike(text: str, other: str) -> int:
    """The number of characters that both begin with."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (own, its) in pairs if own != its), min(len(text), len(other)))


def _check_text(text: str) -> int:
    """The length of the text in UTF-8. Raises `RequestError`."""
    if len(text) > MAX_TEXT_CHARS:
        raise RequestError(f"the text has {len(text)} characters, more than {MAX_TEXT_CHARS}", param="prompt")
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise RequestError("the text contains a lone surrogate", param="prompt") from None


def make_chat_template(settings: TextSettings, worker: ChatWorker | None = None) -> ChatTemplate:
    """The model's template; without one, a `ChatTemplate` that raises an error.

    Adopts an idle `worker`, or ends it.
    """
    if not settings.templates:
        if worker is not None:
            worker.end()
        return ChatTemplate({}, settings.special_tokens)
    return ChatTemplate(settings.templates, settings.special_tokens, worker=worker)
