"""The text settings in a model's files, except the vocabulary: special tokens, chat templates and
end tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ...loader.errors import UsageError
from ..errors import ModelError

if TYPE_CHECKING:
    from ..images.processor import ImageProcessor
    from ..speech.settings import SpeechSettings

MAX_TEMPLATE_BYTES = 256 << 10  # of a file that replaces the model's own

# Returns a file of the model directory by its name; None if there is none.
Files = Callable[[str], bytes | None]

# The classes of transformers' tokenizers that number the two texts of a pair; all others give each
# token type 0, whatever the template in tokenizer.json says.
_CLASSES_WITH_TYPES = frozenset(
    f"{name}Tokenizer"
    for name in (
        "Bert",
        "ConvBert",
        "Deberta",
        "DebertaV2",
        "Electra",
        "LayoutLM",
        "MobileBert",
        "SqueezeBert",
    )
)
# Where no file names the class, the model's type does.
_MODELS_WITH_TYPES = ("bert", "convbert", "deberta", "deberta-v2", "electra", "nomic_bert")


class PairTemplate(NamedTuple):
    """The chat template's form of a pair of texts: messages of the roles query and document."""

    instruction: str | None = None  # a message of the system before them
    is_structured: bool = False  # each content is a list with one part
    variables: Mapping[str, Any] = {}  # of the template


class TextSettings(NamedTuple):
    special_tokens: dict[str, str]  # "bos_token" and so on → its text
    templates: dict[str, str]  # chat templates by name; empty if the model has none
    # The ones that the model's own files name; the tokenizer's is added to them.
    eos_token_ids: frozenset[int]
    # False: every token of a pair has type 0.
    has_token_types: bool = True
    images: ImageProcessor | None = None  # None: the model reads text only
    pairs: PairTemplate | None = None  # None: tokenizer.json has the template for pairs
    speech: SpeechSettings | None = None  # None: the model takes no sound

    def with_template(self, text: str) -> TextSettings:
        """The settings with this chat template, for requests with tools and without."""
        return self._replace(templates={"default": text})

    @classmethod
    def read(cls, files: Files) -> TextSettings:
        """Read tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json,
        chat_template.jinja, and the files of processors and of sentence-transformers.

        Raises `ModelError` for damaged files.
        """
        settings, config = _json_object(files, "tokenizer_config.json"), _json_object(files, "config.json")
        special_tokens = _special_tokens({**_json_object(files, "special_tokens_map.json"), **settings})
        processor = _json_object(files, "processor_config.json")
        preprocessor = _json_object(files, "preprocessor_config.json")
        return cls(
            special_tokens,
            _chat_templates(settings.get("chat_template"), files("chat_template.jinja")),
            _eos_token_ids(_json_object(files, "generation_config.json"), config),
            _has_token_types(settings, config),
            _image_processor(preprocessor, processor, special_tokens),
            _pair_template(files),
            _speech_settings(_json_object(files, "generation_config.json"), config),
        )


def _image_processor(
    preprocessor: dict[str, Any], processor: dict[str, Any], special_tokens: dict[str, str]
) -> ImageProcessor | None:
    if not preprocessor and not processor:
        return None
    from ..images.processor import ImageProcessor  # of few models

    return ImageProcessor.read(preprocessor, processor, special_tokens)


def _speech_settings(generation: dict[str, Any], config: dict[str, Any]) -> SpeechSettings | None:
    if config.get("model_type") != "whisper":
        return None
    from ..speech.settings import SpeechSettings  # of few models

    return SpeechSettings.read(config, generation)


def _pair_template(files: Files) -> PairTemplate | None:
    """The template of pairs, by sentence-transformers 5.4: models that take messages take pairs as messages."""
    own = _json_object(files, "sentence_bert_config.json")
    modalities = own.get("modality_config")
    message = modalities.get("message") if isinstance(modalities, dict) else None
    if not isinstance(message, dict):
        return None
    sentence = _json_object(files, "config_sentence_transformers.json")
    prompts, name = sentence.get("prompts"), sentence.get("default_prompt_name")
    instruction = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if instruction is not None and not isinstance(instruction, str):
        raise ModelError(f"config_sentence_transformers.json: prompts.{name} is not a text")
    processing = own.get("processing_kwargs")
    variables = processing.get("chat_template") if isinstance(processing, dict) else None
    return PairTemplate(
        instruction or None,
        message.get("format") == "structured",
        variables if isinstance(variables, dict) else {},
    )


def read_template(path: str) -> str:
    """Read a chat template from a file of this machine. Raises `UsageError`."""
    hint = "--chat-template must name a file with a Jinja template, such as a model's chat_template.jinja."
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read the chat template {path}: {error.strerror}", key="chat_template", hint=hint
        ) from error
    if len(data) > MAX_TEMPLATE_BYTES:
        raise UsageError(
            f"the chat template {path} is larger than {MAX_TEMPLATE_BYTES} bytes",
            key="chat_template",
            hint=hint,
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the chat template {path} is not UTF-8: {error}", key="chat_template", hint=hint
        ) from error


def read_tokenizer_file(files: Files) -> bytes:
    """Read the content of tokenizer.json, which lowercases texts where sentence_bert_config.json says so.

    Raises `ModelError` if there is none, or if one of the files is damaged.
    """
    data = files("tokenizer.json")
    if data is None:
        raise ModelError(
            "the model has no tokenizer.json",
            hint="Save the tokenizer with transformers (AutoTokenizer, save_pretrained), and pack again.",
        )
    lowercases = _json_object(files, "sentence_bert_config.json").get("do_lower_case", False)
    if not isinstance(lowercases, bool):
        raise ModelError(
            f"sentence_bert_config.json: do_lower_case is {lowercases!r}, but must be true or false"
        )
    return _lowercasing(data) if lowercases else data


def _lowercasing(data: bytes) -> bytes:
    """The content of tokenizer.json with a normalizer that lowercases before all others, as
    sentence-transformers adds it; special tokens in texts keep their spelling.
    """
    try:
        tokenizer = json.loads(data)
        own = tokenizer.get("normalizer")
    except (ValueError, RecursionError, AttributeError):
        return data  # its reader reports the damage
    is_sequence = isinstance(own, dict) and isinstance(own.get("normalizers"), list)
    normalizers = own["normalizers"] if is_sequence else [] if own is None else [own]
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *normalizers]}
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def _json_object(files: Files, name: str) -> dict[str, Any]:
    """The file's content; {} if there is no such file."""
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
    """Names and texts of special tokens; a text is a string, or in an object with its properties."""
    tokens = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _chat_templates(in_settings: Any, file: bytes | None) -> dict[str, str]:
    """Templates by name: one text, a list of {"name", "template"}, or the file, which takes
    precedence.
    """
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
        raise ModelError(f"there is no default chat template, only {', '.join(sorted(templates))}")
    return templates


def _has_token_types(settings: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """True where transformers gives the model the token types of the tokenizer's template."""
    inputs = settings.get("model_input_names")
    if isinstance(inputs, list):
        return "token_type_ids" in inputs
    stated = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if isinstance(stated, str):
        return stated.removesuffix("Fast") in _CLASSES_WITH_TYPES
    return config.get("model_type") in _MODELS_WITH_TYPES


def _eos_token_ids(generation: Mapping[str, Any], config: Mapping[str, Any]) -> frozenset[int]:
    """The tokens that end a text: those of generation_config.json, else config.json."""
    named = generation.get("eos_token_id")
    if named is None:
        named = config.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
            raise ModelError(f"eos_token_id is {token!r}, which is not a token id")
    return frozenset(ids)
