"""Loads a smaller version of a decoder and the original, and lets both read the same text: `teneral eval`.

Invariant: the two are in memory, and nothing else of their size. What is measured, and how, is in `decoders.py`. The
tokens are those of the original's tokenizer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...loader.artifact import open_artifact
from ...loader.errors import UsageError
from ...loader.format.manifest import Manifest, Part
from ...loader.load.options import LoadOptions
from ...loader.memory.limits import available, check_fits
from ...loader.process.cpu import available_cores
from ...loader.sources.base import Source
from ...loader.tools.part_reader import PartReader
from ...loader.tools.progress_bar import TransferProgress, format_bytes
from ..backends.torch.backend import TorchBackend
from ..backends.torch.compute_dtype import ComputePolicy
from ..errors import ModelError
from ..files import ModelFiles
from ..kv.kinds import KVKind
from ..models.build import build_model
from ..models.decoder import Decoder
from .decoders import DecoderQuality, compare_decoders
from .evaluate import WORK_BYTES, OnProgress, check_max_tokens
from .inputs import InputReader
from .report import aligned, decoder_rows, describe_text, quality_json
from .text import EvaluationText
from .tiers import TieredWeights, usable_tiers

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to be compared, and the digest that its manifest must have, where that is said."""

    source: Source
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """What a model takes."""

    url: str
    weight_bytes: int  # in memory
    stored_bytes: int  # the weights as they are stored


@dataclass(frozen=True, slots=True)
class Computing:
    """How an artifact's figures were computed, by torch, as the original's."""

    compute_dtype: str
    kv_dtype: str  # a `KVKind`

    def describe(self) -> str:
        """In words, for people."""
        kv = f", {self.kv_dtype} keys and values" if self.kv_dtype != KVKind.MODEL.value else ""
        return f"by torch, in {self.compute_dtype}{kv}"


@dataclass(frozen=True, slots=True)
class AgainstReport:
    """`original` is what the quality is relative to."""

    artifact: Size
    original: Size
    text: EvaluationText
    num_tokens: int
    computing: Computing
    quality: DecoderQuality

    def as_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "schema": SCHEMA,
            "artifact": asdict(self.artifact),
            "original": asdict(self.original),
            "text": {"file": self.text.name, "tokens": self.num_tokens},
            "computed": asdict(self.computing),
            "quality": quality_json(self.quality),
        }

    def render(self) -> str:
        """For a terminal: what was compared, and a table."""
        head = [
            f"artifact   {self.artifact.url}",
            f"original   {self.original.url}",
            f"text       {describe_text(self.text, self.num_tokens)}",
            f"computed   {self.computing.describe()}",
        ]
        rows = [
            ("", "original", "artifact"),
            ("in memory", format_bytes(self.original.weight_bytes), format_bytes(self.artifact.weight_bytes)),
            ("stored", format_bytes(self.original.stored_bytes), format_bytes(self.artifact.stored_bytes)),
            *decoder_rows(self.quality),
        ]
        return "\n".join([*head, "", *aligned(rows)])


def evaluate_against(
    artifact: Candidate,
    original: Candidate,
    text: EvaluationText,
    *,
    max_tokens: int = 2048,
    kv: KVKind = KVKind.MODEL,
    threads: int | None = None,
    progress: OnProgress | None = None,
) -> AgainstReport:
    """Compare what `artifact` and `original`, both with all their bits, make of the text's first `max_tokens` tokens.

    Either is a packed artifact or a directory of safetensors; `kv` is how the artifact's keys and values lie. Blocks;
    `progress` is called from this thread. torch computes with all cores at hand from then on. Raises `UsageError` for
    an encoder, `InsufficientMemoryError` where all of it does not fit, `ModelError` for what cannot be run or is of
    another vocabulary, and the sources' errors.
    """
    check_max_tokens(max_tokens)
    torch.set_num_threads(available_cores())
    manifests = [open_artifact(each.source, digest=each.digest) for each in (artifact, original)]
    check_fits(
        sum(manifest.weight_bytes for manifest in manifests) + WORK_BYTES,
        available(),
        what="comparing the two",
        made_of="the weights of both, and room to compute in",
    )
    total_bytes = sum(part.size_bytes for manifest in manifests for part in manifest.parts)
    count = _Counter(progress, total_bytes)
    ours = _Model(artifact.source, manifests[0], threads, count)
    theirs = _Model(original.source, manifests[1], threads, count)
    _check_comparable(ours.decoder, theirs.decoder)
    read = InputReader(theirs.files).for_decoder(text, max_tokens)
    quality = compare_decoders(ours.decoder, theirs.decoder, read.tokens, prefix=read.prefix, kv=kv)
    return AgainstReport(
        artifact=ours.size,
        original=theirs.size,
        text=text,
        num_tokens=len(read.tokens),
        computing=Computing(ours.decoder.dtype.label, kv.value),
        quality=quality,
    )


def _check_comparable(ours: Decoder, theirs: Decoder) -> None:
    """Raises `ModelError` for models that one was not made of the other."""
    for what, our_count, their_count in (
        ("knows {} tokens", ours.config.vocab_size, theirs.config.vocab_size),
        ("has hidden states of {} numbers", ours.config.hidden_size, theirs.config.hidden_size),
    ):
        if our_count != their_count:
            raise ModelError(
                f"the artifact {what.format(our_count)}, and the original {their_count}",
                hint="Give what the artifact was made of.",
            )


class _Counter:
    """Tells how far reading is, over both models."""

    def __init__(self, progress: OnProgress | None, total_bytes: int) -> None:
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = total_bytes

    def __call__(self, part: Part) -> None:
        self._done_bytes += part.size_bytes
        if self._progress is not None:
            self._progress(TransferProgress(self._done_bytes, self._total_bytes))


class _Model:
    """One of the two, with all its weights."""

    def __init__(self, source: Source, manifest: Manifest, threads: int | None, count: _Counter) -> None:
        self.files = ModelFiles(source, manifest, LoadOptions())
        self.size = Size(source.url, manifest.weight_bytes, sum(part.size_bytes for part in manifest.parts))
        weights = TieredWeights(manifest)
        built = build_model(
            self.files.json("config.json", required=True),
            weights.tensors(),
            [TorchBackend(ComputePolicy.of_this_machine())],
        )
        if not isinstance(built, Decoder):
            raise UsageError(
                f"{source.url} is an encoder, and only decoders are compared so",
                key="artifact",
                hint="`teneral eval-draft` judges an encoder's draft.",
            )
        self.decoder = built
        for tier in usable_tiers(manifest)[-1:]:
            weights.fill(tier, PartReader(source, manifest), threads=threads, on_part=count)
