"""The files of a model directory: those that hold its weights, and the small ones that go along.

Any source, also one that cannot list its objects: the usual names are tried there. Everything read
is distrusted; a pickle is never read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..errors import AccessDeniedError, CheckpointError, NotFoundError, UsageError
from ..process.cpu import parallel_map
from ..sources.base import ObjectInfo, Source, check_name
from .limits import MAX_SMALL_FILE_BYTES

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

# What goes along with the weights. A list of known names, so that sources that cannot list behave
# like those that can, and that no code, no pickle and no second copy of the weights is ever
# carried.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
)
# Of models with a modules.json, which sentence-transformers writes: layers behind the pooling, with their weights, and
# the tokens whose logits are a score.
MODULE_FILES = (
    "1_LogitScore/config.json",
    *(f"{folder}/{name}" for folder in ("2_Dense", "3_Dense") for name in ("config.json", SINGLE_NAME)),
)
# Of artifacts, and of no model directory. ONNX models have files that end in `.onnx`, too.
ARTIFACT_FILES = ("tensors.b3", "adapter_config.json", "onnx.json")
# Endings of files that look like a model's settings.
_SETTINGS = (".json", ".jinja", ".txt", ".model")
MAX_SHOWN = 5  # names in a message
MAX_INDEX_BYTES = 64 * 1024 * 1024
MAX_SHARDS = 4096
MAX_LISTED = 10_000

_OTHER_FORMATS = {
    ".bin": "pickled weights",
    ".pt": "pickled weights",
    ".pth": "pickled weights",
    ".ckpt": "pickled weights",
    ".gguf": "a GGUF file",
    ".h5": "TensorFlow weights",
    ".msgpack": "Flax weights",
    ".onnx": "an ONNX model",
}
_CONVERT_HINT = (
    "Only safetensors are read, which cannot run code. Convert the model once, with transformers: "
    "AutoModel.from_pretrained(DIR).save_pretrained(NEW_DIR, safe_serialization=True)."
)
_HINTS = {
    ".onnx": "Pack it, and serve what that makes: teneral pack FOLDER/model.onnx ARTIFACT",
    ".gguf": "Give the file's own address, or, on the Hub, its quantisation: org/name:Q4_K_M",
}
CONNECTIONS = 8


def find_objects(source: Source) -> dict[str, ObjectInfo]:
    """The directory's objects by name; where it cannot be listed, those of the usual names that
    exist.
    """
    try:
        listed = list(itertools.islice(source.list(), MAX_LISTED + 1))
    except UsageError:
        return _try_usual_names(source)
    except AccessDeniedError as error:
        if not error.may_be_absent:  # the credentials are refused, and not the right to list
            raise
        return _try_usual_names(source)
    if len(listed) > MAX_LISTED:
        raise CheckpointError(
            f"{source.url} holds more than {MAX_LISTED} objects",
            where=source.url,
            hint="Give the folder of one model.",
        )
    if not listed:
        raise NotFoundError(
            f"there is nothing at {source.url}",
            source=source.url,
            hint="Check the address; for S3 it is s3://BUCKET/FOLDER, for Cloud Storage gs://BUCKET/FOLDER.",
        )
    return {info.name: info for info in listed}


def _try_usual_names(source: Source) -> dict[str, ObjectInfo]:
    """Raises `AccessDeniedError` for an object that is denied, unless the store denies absent
    objects as well and the weights are among those that it gives.
    """
    denied: list[AccessDeniedError] = []

    def look(name: str) -> ObjectInfo | None:
        try:
            return source.stat(name)
        except NotFoundError:
            return None
        except AccessDeniedError as error:
            denied.append(error)
            return None

    names = (SINGLE_NAME, INDEX_NAME, *SMALL_FILES, "pytorch_model.bin", "pytorch_model.bin.index.json")
    found = [info for info in parallel_map(look, names, num_threads=CONNECTIONS) if info is not None]
    names_found = {info.name: info for info in found}
    if "modules.json" in names_found:
        more = parallel_map(look, MODULE_FILES, num_threads=CONNECTIONS)
        names_found |= {info.name: info for info in more if info is not None}
    if denied:
        _check_denied(source, denied, names_found)
    return names_found


def _check_denied(source: Source, denied: list[AccessDeniedError], found: Mapping[str, ObjectInfo]) -> None:
    from ..sources.base import denies_absent, undecided  # only after a denial

    refused = next((error for error in denied if not error.may_be_absent), None)
    if refused is not None:
        raise refused
    if not found or not denies_absent(source):
        raise denied[0]
    weights = (SINGLE_NAME, INDEX_NAME)
    if not any(name in found for name in weights) and any(error.name in weights for error in denied):
        raise undecided(source, " or ".join(weights))


class Shards(NamedTuple):
    """The files that hold the weights."""

    infos: tuple[ObjectInfo, ...]
    weight_map: Mapping[str, str]  # tensor → shard name, as the index says; empty without one


def choose_shards(source: Source, found: Mapping[str, ObjectInfo]) -> Shards:
    """The files that hold the weights: one of the usual name, else those of the index, else all
    there are.
    """
    if SINGLE_NAME in found:
        return Shards((found[SINGLE_NAME],), {})
    here = sorted(name for name in found if "/" not in name)
    indices = [name for name in here if name.endswith(INDEX_SUFFIX)]
    if indices:
        index = INDEX_NAME if INDEX_NAME in indices else indices[0]
        if len(indices) > 1 and index != INDEX_NAME:
            raise CheckpointError(
                f"{source.url} holds several models: {', '.join(indices)[:200]}",
                where=source.url,
                hint="Move each into a folder of its own.",
            )
        data, _ = source.read(index, max_bytes=MAX_INDEX_BYTES)
        weight_map = parse_index(data, where=index)
        return Shards(_find_shards(source, found, sorted(set(weight_map.values())), index), weight_map)
    names = [name for name in here if name.endswith(SUFFIX)]
    if not names:
        raise _no_weights(source, found)
    return Shards(tuple(found[name] for name in names), {})


def parse_index(data: bytes, *, where: str) -> dict[str, str]:
    """The weight map of an index file: tensor name → shard next to the index. Raises
    `CheckpointError`.
    """
    from .safetensors import decode_object  # servers need the names of files alone

    weight_map = decode_object(data, where=where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where} has no weight_map", where=where)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_shard_name(shard):
            raise CheckpointError(
                f"{where}: tensor {tensor[:100]!r} is listed in {str(shard)[:100]!r}, "
                "which is not a safetensors file of this folder",
                where=where,
            )
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise CheckpointError(f"{where} names more than {MAX_SHARDS} shards", where=where)
    return weight_map


def _is_shard_name(name: str) -> bool:
    try:
        return check_name(name).endswith(SUFFIX) and "/" not in name
    except UsageError:
        return False


def _find_shards(
    source: Source, found: Mapping[str, ObjectInfo], names: list[str], index: str
) -> tuple[ObjectInfo, ...]:
    infos: list[ObjectInfo] = []
    missing: list[str] = []
    for name in names:
        try:
            infos.append(found[name] if name in found else source.stat(name))
        except NotFoundError:
            missing.append(name)
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(names)} files named in {index} are missing: {', '.join(missing)[:300]}",
            where=index,
            hint="The download is incomplete: fetch the missing files.",
        )
    return tuple(infos)


def _no_weights(source: Source, found: Mapping[str, ObjectInfo]) -> CheckpointError:
    for name in sorted(found):
        suffix = name[name.rfind(".") :] if "." in name else ""
        if suffix in _OTHER_FORMATS:
            return CheckpointError(
                f"{source.url} holds {_OTHER_FORMATS[suffix]} ({name}) and no safetensors",
                where=source.url,
                hint=_HINTS.get(suffix, _CONVERT_HINT),
            )
    return CheckpointError(
        f"{source.url} holds neither manifest.json nor safetensors files",
        where=source.url,
        hint=f"Give the folder of an artifact, or of a model with {SINGLE_NAME} or {INDEX_NAME}.",
    )


def unknown_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names of small files that no reader of an artifact looks for."""
    known = {*SMALL_FILES, *MODULE_FILES, *ARTIFACT_FILES}
    return tuple(name for name in names if name not in known and not name.endswith(".onnx"))


def shorten(names: Sequence[str]) -> str:
    """The first names for a message."""
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more


def left_out(found: Mapping[str, ObjectInfo]) -> tuple[str, ...]:
    """The names of a model directory's files that look like settings, but whose names are not known."""
    return tuple(
        name
        for name in unknown_names(sorted(found))
        if "/" not in name and name.endswith(_SETTINGS) and not name.endswith(".index.json")
    )


def small_files(found: Mapping[str, ObjectInfo]) -> tuple[ObjectInfo, ...]:
    files = tuple(found[name] for name in (*SMALL_FILES, *MODULE_FILES) if name in found)
    for info in files:
        if info.size_bytes > MAX_SMALL_FILE_BYTES:
            raise CheckpointError(
                f"{info.name} has {info.size_bytes} bytes, of {MAX_SMALL_FILE_BYTES} allowed",
                where=info.name,
            )
    return files
