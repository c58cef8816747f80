"""Text ↔ tokens, by the model's own files.

`tokenizer.json` says how (the `tokenizers` library reads it); the other files name the special tokens, where
a generation ends, and the chat template. Nothing is known here of the model, of its context length or of
sampling.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, RequestError
from .chat import DEFAULT_TEMPLATE, ChatTemplate, Message

if TYPE_CHECKING:
    import tokenizers

MAX_TEXT_CHARS = 1 << 20  # tokenising takes up to 0.7 s for so many, and more than in proportion beyond


class TextTokenizer:
    """One model's text. Thread-safe, and other threads run while a long text is tokenised."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """`special_tokens` maps names such as "bos_token" to their text. Takes `backend` over, and may change
        its settings.
        """
        # Files of embedding models ask for both; here each text has its own length, and the engine refuses
        # what is too long.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template or ChatTemplate({"default": DEFAULT_TEMPLATE}, self.special_tokens)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_files(cls, files: Callable[[str], bytes | None]) -> TextTokenizer:
        """`files` gives a file of the model directory by its name, None when there is none.

        Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json,
        config.json and chat_template.jinja. Raises `ModelError` for what is missing or damaged.
        """
        data = files("tokenizer.json")
        if data is None:
            raise ModelError(
                "the model has no tokenizer.json",
                hint="Save the tokenizer with transformers (AutoTokenizer, save_pretrained), and pack again.",
            )
        settings = _json_object(files, "tokenizer_config.json")
        special_tokens = _special_tokens({**_json_object(files, "special_tokens_map.json"), **settings})
        templates = _chat_templates(settings.get("chat_template"), files("chat_template.jinja"))
        chat_template = ChatTemplate(templates or {"default": DEFAULT_TEMPLATE}, special_tokens)
        if templates:
            chat_template.start()  # beside the parsing of tokenizer.json, which takes as long
        backend = _parse(data)
        _mark_special(backend, special_tokens)
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=_eos_token_ids(files, special_tokens, backend),
            chat_template=chat_template,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's tokens, with those that the model wants around a text unless told otherwise.

        For what `chat` returned, tell otherwise: the template wrote them. Special tokens that stand in the
        text as text become themselves. Raises `RequestError` for a text that is too long or is not Unicode.
        """
        if len(text) > MAX_TEXT_CHARS:
            raise RequestError(
                f"the text has {len(text)} characters, but {MAX_TEXT_CHARS} is the most", param="prompt"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("the text has half of a surrogate pair in it", param="prompt") from None
        # Unlike `encode`, it lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens together; bytes that are no UTF-8 come as U+FFFD, tokens unknown here as
        nothing.
        """
        try:
            text: str = self._backend.decode(tokens, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"these are no tokens: {error}", param="tokens") from error
        return text

    def id_to_piece(self, token: int) -> str | None:
        """The token as the vocabulary spells it ("Ġhello", "<0x0A>"); None when there is none."""
        return self._backend.id_to_token(token) if 0 <= token < 1 << 32 else None

    def piece_to_id(self, piece: str) -> int | None:
        return self._backend.token_to_id(piece)

    def chat(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt that the model's chat template makes of the messages, special tokens included as text.

        `variables` are handed to the template, as `enable_thinking` is. A model without a template gets a
        transcript to go on with. Blocks for about a millisecond; errors are those of `ChatTemplate.render`.
        """
        return self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    def close(self) -> None:
        """End the process that renders chat templates; it is started again when it is needed."""
        self.chat_template.close()


def _parse(data: bytes) -> tokenizers.Tokenizer:
    import tokenizers  # 17 ms that whoever only names this module need not pay

    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except BaseException as error:
        # A bug in the library's Rust comes as a PanicException, which is no Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelError(f"tokenizer.json cannot be read: {error}") from error
        raise


def _json_object(files: Callable[[str], bytes | None], name: str) -> dict[str, Any]:
    """The file's content; {} when there is no such file."""
    data = files(name)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{name} is not a JSON object")
    return value


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Names and texts of special tokens; a text stands as it is, or in an object with its properties."""
    tokens = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _mark_special(backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
    """Have every named special token that the vocabulary knows recognised in texts, and skipped when
    decoding.
    """
    known = [text for text in special_tokens.values() if backend.token_to_id(text) is not None]
    backend.add_special_tokens(known)


def _chat_templates(in_settings: Any, file: bytes | None) -> dict[str, str]:
    """Templates by name: one text, a list of {"name", "template"}, or the file, which goes before both."""
    if file is not None:
        try:
            return {"default": file.decode("utf-8")}
        except UnicodeDecodeError as error:
            raise ModelError(f"chat_template.jinja is not UTF-8: {error}") from error
    if isinstance(in_settings, str):
        return {"default": in_settings}
    templates = {}
    for entry in in_settings if isinstance(in_settings, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            templates[str(entry.get("name"))] = entry["template"]
    if templates and "default" not in templates:
        raise ModelError(f"no chat template is the default one; there are {', '.join(sorted(templates))}")
    return templates


def _eos_token_ids(
    files: Callable[[str], bytes | None], special_tokens: Mapping[str, str], backend: tokenizers.Tokenizer
) -> frozenset[int]:
    """Every token that ends a text: those of generation_config.json (else config.json), and the tokenizer's
    own.
    """
    named = _json_object(files, "generation_config.json").get("eos_token_id")
    if named is None:
        named = _json_object(files, "config.json").get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
            raise ModelError(f"eos_token_id is {token!r}, which is no token")
    own = backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return frozenset(ids) | (frozenset() if own is None else {own})
