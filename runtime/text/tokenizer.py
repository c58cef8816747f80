"""Text ↔ tokens, by the model's own files.

`tokenizer.json` says how; the other files name the special tokens, where a generation ends, and the chat template.
Nothing is known here of the model, of its context length or of sampling, nor whether the tokens are made in this
process or in another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ContextLengthError, RequestError
from ..grammar.compiler import GrammarCompiler
from ..grammar.matcher import Grammar
from ..grammar.spec import GrammarSpec
from .backend import MAX_TOKEN, Backend, LocalBackend
from .chat import ChatTemplate, ChatWorker, Message
from .pairs import EncodedPair
from .settings import Files, TextSettings, read_tokenizer_file

MAX_TEXT_CHARS = 1 << 20  # tokenising takes up to 0.7 s for so many, and more than in proportion beyond


class TextTokenizer:
    """One model's text. Thread-safe, and other threads run while a long text is tokenised."""

    def __init__(
        self,
        backend: Backend,
        settings: TextSettings,
        *,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Closes `backend` and `chat_template` when it is closed."""
        self._backend = backend
        self.special_tokens = settings.special_tokens
        self.chat_template = chat_template or make_chat_template(settings)
        self.vocab_size = backend.vocab_size
        own = backend.piece_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_token_ids = settings.eos_token_ids | (frozenset() if own is None else {own})
        self._grammars = GrammarCompiler(backend.tokenizer_json, self.eos_token_ids)

    @classmethod
    def from_files(
        cls, files: Files, *, adjust: Callable[[TextSettings], TextSettings] = lambda settings: settings
    ) -> TextTokenizer:
        """In this process. `files` gives a file of the model directory by its name, None when there is none. `adjust`
        is given the model's settings before the vocabulary is read, and gives those to use.

        Raises `ModelError` for what is missing or damaged.
        """
        settings = adjust(TextSettings.read(files))
        chat_template = make_chat_template(settings)
        backend = LocalBackend.from_file(read_tokenizer_file(files), settings.special_tokens)
        return cls(backend, settings, chat_template=chat_template)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """The text's tokens, with those that the model wants around a text unless told otherwise.

        For what `chat` returned, tell otherwise: the template wrote them. Special tokens that stand in the
        text as text become themselves. Raises `RequestError` for a text that is too long or is not Unicode, and
        `ContextLengthError` for one that cannot come to `max_tokens` or fewer, before any work where the vocabulary
        shows it.
        """
        num_bytes = _check_text(text)
        if max_tokens is not None:
            self._check_length(num_bytes, max_tokens)
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def encode_pairs(self, pairs: Sequence[tuple[str, str | None]]) -> list[EncodedPair]:
        """Each pair of texts, or each text by itself, as the model's own template has it, special tokens included.

        Raises `RequestError` for a text that is too long or is not Unicode.
        """
        for pair in pairs:
            for text in pair:
                if text is not None:
                    _check_text(text)
        return self._backend.encode_pairs(pairs)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Which of the text's characters each of its tokens stands for, from and up to, without special tokens.

        Tokens that share a character's bytes all stand for all of it. Raises as `encode` does.
        """
        _check_text(text)
        return self._backend.offsets(text)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens together; bytes that are no UTF-8 come as U+FFFD, tokens unknown here as
        nothing.
        """
        return self._backend.decode(tokens, skip_special_tokens=skip_special_tokens)

    def id_to_piece(self, token: int) -> str | None:
        """The token as the vocabulary spells it ("Ġhello", "<0x0A>"); None when there is none."""
        return self._backend.id_to_piece(token) if 0 <= token < MAX_TOKEN else None

    def piece_to_id(self, piece: str) -> int | None:
        return self._backend.piece_to_id(piece)

    def chat(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt that the model's chat template makes of the messages, special tokens included as text.

        `variables` are handed to the template, as `enable_thinking` is. Blocks for about a millisecond; errors are
        those of `ChatTemplate.render`.
        """
        return self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    @property
    def templates(self) -> Mapping[str, str]:
        """The chat templates by name; none where the model has none."""
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

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        """The grammar over this vocabulary. The first one takes up to a second, in which other threads run. Raises
        `GrammarError`, and `RequestError` where the tokenizer is of a kind that takes none.
        """
        return self._grammars.compile(spec)

    def close(self) -> None:
        """End the processes that tokenise and that render chat templates."""
        self.chat_template.close()
        self._backend.close()


def _check_text(text: str) -> int:
    """Its length in UTF-8. Raises `RequestError`."""
    if len(text) > MAX_TEXT_CHARS:
        raise RequestError(
            f"the text has {len(text)} characters, but {MAX_TEXT_CHARS} is the most", param="prompt"
        )
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise RequestError("the text has half of a surrogate pair in it", param="prompt") from None


def make_chat_template(settings: TextSettings, worker: ChatWorker | None = None) -> ChatTemplate:
    """The model's template, its process started; or one that says that there is none. Takes over a `worker` that waits,
    or ends it.
    """
    if not settings.templates:
        if worker is not None:
            worker.end()
        return ChatTemplate({}, settings.special_tokens)
    template = ChatTemplate(settings.templates, settings.special_tokens, worker=worker)
    template.start()  # beside the parsing of tokenizer.json, which takes as long
    return template
