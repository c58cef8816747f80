"""From token states to an embedding, or a score, as sentence-transformers describes it: modules.json and config.json of
modules.

Both spellings of 1_Pooling/config.json are read: a flag for each mode (`pooling_mode_mean_tokens`), and
`pooling_mode` by name. After pooling come Dense modules, if any, and then Normalize, if it is there. Unknown modules,
and those in another order, are refused by name. A score comes from a LogitScore module, right behind the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from ...loader.errors import CheckpointError
from ..errors import ModelError
from ..tensors import DType, Tensor, aligned_empty
from ..weights import DictWeights
from .fields import Fields

if TYPE_CHECKING:
    from ..files import ModelFiles

POOLING_MODES = ("mean", "cls", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean")
DENSE_FOLDERS = ("2_Dense", "3_Dense")
DENSE_WEIGHTS = "model.safetensors"  # in the folder of a Dense module
SCORE_FOLDER = "1_LogitScore"

_HINT = f"Supported: {', '.join(POOLING_MODES)}."
_MODE_OF_FLAG = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_SCORE = "LogitScore"
CLASSIFIER_TOKENS = "classifier_from_token"  # vLLM's key of config.json
_DIFFERENCE = "from_2_way_softmax"
# What a Dense module's `activation_function` is called, which is the name of a class of torch's.
_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
_MAX_WIDTH = 1 << 16


class Dense(Struct, frozen=True):
    """A layer that embeddings pass through: activation(x @ weight.T + bias)."""

    folder: str  # one of DENSE_FOLDERS, which holds its weights
    num_in: int
    num_out: int
    has_bias: bool
    activation: str  # "tanh", or one of the names that config.json files use; "": none


class SentenceConfig(Struct, frozen=True):
    """From token states to an embedding."""

    pooling: str  # one of POOLING_MODES
    dense: tuple[Dense, ...]
    normalize: bool  # to unit length


class ScoreTokens(Struct, frozen=True):
    """The tokens whose logits behind a text are its score."""

    true: int
    false: int | None  # its logit is subtracted; None: none is


def score_tokens_of(
    modules: Any, logit_score: Any, vocab_size: int, *, of_classifier: bool = False
) -> ScoreTokens | None:
    """None where modules.json has no LogitScore, unless `logit_score` is that `of_classifier`; else it is what the
    config.json in the module's folder holds. Raises `ModelError` where that is missing or wrong, or other modules come
    with it.
    """
    found = [] if modules is None else _modules(modules)
    if not any(kind == _SCORE for kind, _ in found):
        if not of_classifier:
            return None
        if logit_score is None:
            raise ModelError(f"config.json has {CLASSIFIER_TOKENS}, but there is no tokenizer.json")
        return _score_tokens(Fields(logit_score, where=f"{CLASSIFIER_TOKENS}: "), vocab_size)
    for (kind, fields), only in zip(found, ("Transformer", _SCORE, ""), strict=False):
        if kind != only:
            raise fields.wrong(
                "type", "but LogitScore comes right behind Transformer, and is the last module"
            )
    found[1][1].choice("path", (SCORE_FOLDER,))
    file = f"{SCORE_FOLDER}/config.json"
    if logit_score is None:
        raise ModelError(f"modules.json has a LogitScore module in {SCORE_FOLDER}, but there is no {file}")
    return _score_tokens(Fields(logit_score, file=file), vocab_size)


def _score_tokens(own: Fields, vocab_size: int) -> ScoreTokens:
    own.choice("module_input_name", ("causal_logits",), default="causal_logits")
    return ScoreTokens(
        own.integer("true_token_id", low=0, high=vocab_size - 1),
        own.optional_integer("false_token_id", low=0, high=vocab_size - 1),
    )


def logit_score_of(config: Fields, tokenizer: Any) -> dict[str, int] | None:
    """The config.json of a LogitScore that scores as vLLM does by a decoder's head: by the logit of the last one of the
    file's tokens, less that of the one before it. `tokenizer` is the content of tokenizer.json; None without it. Raises
    `ModelError` for other classifiers, and for tokens that it does not have.
    """
    tokens = config.texts(CLASSIFIER_TOKENS) or []
    is_qwen3 = config.boolean("is_original_qwen3_reranker", default=False)
    methods = ("no_post_processing", _DIFFERENCE)
    method = _DIFFERENCE if is_qwen3 else config.choice("method", methods, default=methods[0])
    if len(tokens) != 1 + (method == _DIFFERENCE):
        raise config.wrong(
            CLASSIFIER_TOKENS,
            f'but must be one token, or two with a method of "{_DIFFERENCE}" (or is_original_qwen3_reranker)',
        )
    if tokenizer is None:
        return None
    ids = [_token_id(tokenizer, token) for token in tokens]
    for token, number in zip(tokens, ids, strict=True):
        if number is None:
            raise config.wrong(CLASSIFIER_TOKENS, f"but tokenizer.json has no token {token!r}")
    return dict(zip(("true_token_id", "false_token_id"), reversed(ids), strict=False))  # type: ignore[arg-type]


def _token_id(tokenizer: Any, token: str) -> int | None:
    """The number of a token that is written so in a tokenizer.json. Raises `ModelError` where that has other fields."""
    try:
        added = {each["content"]: int(each["id"]) for each in tokenizer.get("added_tokens") or ()}
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # of unigrams, with their weights
            vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
        found = added.get(token, vocabulary.get(token))
        return None if found is None else int(found)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError(
            f"tokenizer.json has no vocabulary in which {CLASSIFIER_TOKENS} finds tokens"
        ) from None


def sentence_of(modules: Any, pooling: Any, dense: Mapping[str, Any], hidden_size: int) -> SentenceConfig:
    """Any of the files may be None; `dense` has the config.json of each folder with a Dense module.

    Without modules.json embeddings are normalised, which is what clients of an embeddings endpoint expect.
    Raises `ModelError` for a module or a mode that is not supported.
    """
    mode = "mean" if pooling is None else _mode(Fields(pooling, file="1_Pooling/config.json"))
    for kind, fields in [] if modules is None else _modules(modules):
        if kind == _SCORE:
            raise fields.wrong("type", "but only decoders have the logits that it reads")
    layers = []
    for folder in dense_folders(modules):
        layer = _dense(folder, dense.get(folder), hidden_size)
        hidden_size = layer.num_out
        layers.append(layer)
    normalize = modules is None or any(kind == "Normalize" for kind, _ in _modules(modules))
    return SentenceConfig(mode, tuple(layers), normalize)


def dense_folders(modules: Any) -> list[str]:
    """The folders of the Dense modules that modules.json lists, in order. Raises `ModelError` where it is wrong."""
    if modules is None:
        return []
    folders = []
    for position, (kind, fields) in enumerate(_modules(modules)):
        if kind == "Dense":
            folders.append(fields.choice("path", DENSE_FOLDERS))
        if kind in ("Transformer", "Pooling") and position != ("Transformer", "Pooling").index(kind):
            raise fields.wrong("type", "but Transformer must come first, and Pooling second")
    return folders


def dense_files(files: ModelFiles, modules: Any) -> dict[str, Any]:
    """The config.json and the weights of each Dense module's folder, as arguments of `build_model`."""
    folders = dense_folders(modules)
    if not folders:
        return {}
    names = {folder: f"{folder}/{DENSE_WEIGHTS}" for folder in folders}
    read = {folder: files.read(name) for folder, name in names.items()}
    return {
        "dense": {folder: files.json(f"{folder}/config.json") for folder in folders},
        "dense_weights": {
            folder: _weights_of(data, names[folder]) for folder, data in read.items() if data is not None
        },
    }


def _weights_of(data: bytes, name: str) -> DictWeights:
    """The tensors of a safetensors file, copied to aligned memory. Raises `CheckpointError` if it
    is damaged.
    """
    from ...loader.format.safetensors import PREFIX_BYTES, header_size, parse_header  # of few models

    if len(data) < PREFIX_BYTES:
        raise CheckpointError(f"{name} has {len(data)} bytes and no header", where=name)
    end = PREFIX_BYTES + header_size(data[:PREFIX_BYTES], len(data), where=name)
    tensors: dict[str, Tensor] = {}
    for entry in parse_header(data[PREFIX_BYTES:end], len(data), where=name).entries.values():
        if entry.dtype not in DType.__members__:
            raise ModelError(f"tensor {entry.name} of {name} is {entry.dtype}, which is not supported")
        dtype = DType(entry.dtype)
        array = aligned_empty(entry.shape, dtype.numpy)
        array[...] = np.frombuffer(data[entry.begin : entry.end], dtype.numpy).reshape(entry.shape)
        tensors[entry.name] = Tensor(dtype, array)
    return DictWeights(tensors)


def _modules(modules: Any) -> list[tuple[str, Fields]]:
    """The modules in order: the last word of each one's class name, and its fields."""
    if not isinstance(modules, list):
        raise ModelError("modules.json must be a list of modules")
    if len(modules) > len(_MODULES) + len(DENSE_FOLDERS):
        raise ModelError(f"modules.json has {len(modules)} modules, which is more than are supported")
    found: list[tuple[str, Fields]] = []
    for position, module in enumerate(modules):
        fields = Fields(module, file="modules.json", where=f"[{position}].")
        kind = fields.text("type").rsplit(".", 1)[-1]
        if kind not in (*_MODULES, _SCORE):
            raise fields.wrong(
                "type", "which is not supported", hint=f"Supported: {', '.join((*_MODULES, _SCORE))}."
            )
        if any(before == "Normalize" for before, _ in found):
            raise fields.wrong("type", "but Normalize must be the last module")
        found.append((kind, fields))
    return found


def _dense(folder: str, data: Any, num_in: int) -> Dense:
    file = f"{folder}/config.json"
    if data is None:
        raise ModelError(f"modules.json has a Dense module in {folder}, but there is no {file}")
    fields = Fields(data, file=file)
    stated = fields.integer("in_features", low=1, high=_MAX_WIDTH)
    if stated != num_in:
        raise fields.wrong("in_features", f"but what comes before it has {num_in}")
    for key, only in (
        ("module_input_name", "sentence_embedding"),
        ("module_output_name", "sentence_embedding"),
    ):
        fields.choice(key, (only,), default=only)
    stated_activation = fields.text("activation_function") if "activation_function" in fields else "Tanh"
    activation = _ACTIVATIONS.get(stated_activation.rsplit(".", 1)[-1])
    if activation is None:
        raise fields.wrong(
            "activation_function", "which is not supported", hint=f"Supported: {', '.join(_ACTIVATIONS)}."
        )
    return Dense(
        folder=folder,
        num_in=num_in,
        num_out=fields.integer("out_features", low=1, high=_MAX_WIDTH),
        has_bias=fields.boolean("bias", default=True),
        activation=activation,
    )


def _mode(pooling: Fields) -> str:
    if "pooling_mode" in pooling:
        return pooling.choice("pooling_mode", POOLING_MODES)
    modes = [mode for flag, mode in _MODE_OF_FLAG.items() if pooling.boolean(flag, default=False)]
    if len(modes) != 1:
        raise ModelError(
            f"1_Pooling/config.json asks for {len(modes)} pooling modes, but must for one", hint=_HINT
        )
    return modes[0]
