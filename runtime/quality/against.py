"""Comparison of a smaller version of a decoder with the original over one text: `teneral eval`.

Invariant: the two are in memory, and nothing else of their size. The measures are in `decoders.py`.
The tokens are those of the original's tokenizer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...loader.artifact import open_artifact
from ...loader.format.manifest import Manifest
from ...loader.memory.limits import available, check_fits
from ...loader.sources.base import Source
from ...loader.tools.progress_bar import format_bytes
from ..errors import ModelError
from ..kv.storage import KVKind
from ..models.decoder import Decoder
from .decoders import DecoderQuality, compare_decoders
from .evaluate import WORK_BYTES, OnProgress, PartCounter, WholeDecoder, check_max_tokens
from .report import aligned, decoder_rows, describe_text, quality_json
from .text import EvaluationText, InputReader

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """A model to be compared, and the pinned digest of its manifest, if any."""

    source: Source
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a model."""

    url: str
    weight_bytes: int  # in memory
    stored_bytes: int  # of the weights as stored

    @classmethod
    def of(cls, source: Source, manifest: Manifest) -> Size:
        return cls(source.url, manifest.weight_bytes, sum(part.size_bytes for part in manifest.parts))


@dataclass(frozen=True, slots=True)
class Computing:
    """The settings of an artifact's computation."""

    backend: str
    compute_dtype: str
    kv_dtype: str  # a `KVKind`

    def describe(self) -> str:
        """The settings as a phrase for people."""
        kv = f", {self.kv_dtype} keys and values" if self.kv_dtype != KVKind.MODEL.value else ""
        return f"by {self.backend}, in {self.compute_dtype}{kv}"


@dataclass(frozen=True, slots=True)
class AgainstReport:
    """The result. `original` is the reference of the quality."""

    artifact: Size
    original: Size
    text: EvaluationText
    num_tokens: int
    computing: Computing
    quality: DecoderQuality

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON-ready value."""
        return {
            "schema": SCHEMA,
            "artifact": asdict(self.artifact),
            "original": asdict(self.original),
            "text": {"file": self.text.name, "tokens": self.num_tokens},
            "computed": asdict(self.computing),
            "quality": quality_json(self.quality),
        }

    def render(self) -> str:
        """The report for a terminal: the compared models, and a table."""
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
    artifact: ComparedModel,
    original: ComparedModel,
    text: EvaluationText,
    *,
    max_tokens: int = 2048,
    kv: KVKind = KVKind.MODEL,
    threads: int | None = None,
    progress: OnProgress | None = None,
) -> AgainstReport:
    """Compare `artifact` and `original`, both with all their bits, over the text's first
    `max_tokens` tokens.

    Either is a packed artifact or a directory of safetensors; `kv` is the storage format of the
    artifact's keys and values. Blocks; `progress` is called from this thread. Each is computed by
    the backend that a server would choose. Raises `UsageError` for an encoder, `InsufficientMemoryError` if
    both do not fit, `ModelError` for a model that cannot be run or has another vocabulary, and the
    sources' errors.
    """
    check_max_tokens(max_tokens)
    manifests = [open_artifact(each.source, digest=each.digest) for each in (artifact, original)]
    check_fits(
        sum(manifest.weight_bytes for manifest in manifests) + WORK_BYTES,
        available(),
        what="comparing the two",
        made_of="the weights of both, and room to compute in",
    )
    total_bytes = sum(part.size_bytes for manifest in manifests for part in manifest.parts)
    count = PartCounter(progress, total_bytes)
    ours = WholeDecoder(artifact.source, manifests[0], threads=threads, on_part=count)
    theirs = WholeDecoder(original.source, manifests[1], threads=threads, on_part=count)
    _check_comparable(ours.decoder, theirs.decoder)
    read = InputReader(theirs.files).for_decoder(text, max_tokens)
    quality = compare_decoders(ours.decoder, theirs.decoder, read.tokens, prefix=read.prefix, kv=kv)
    return AgainstReport(
        artifact=Size.of(artifact.source, manifests[0]),
        original=Size.of(original.source, manifests[1]),
        text=text,
        num_tokens=len(read.tokens),
        computing=Computing(ours.decoder.executor.name, ours.decoder.dtype.label, kv.value),
        quality=quality,
    )


def _check_comparable(ours: Decoder, theirs: Decoder) -> None:
    """Raise `ModelError` for models that cannot be versions of each other."""
    for what, our_count, their_count in (
        ("has {} tokens", ours.config.vocab_size, theirs.config.vocab_size),
        ("has hidden states of {} numbers", ours.config.hidden_size, theirs.config.hidden_size),
    ):
        if our_count != their_count:
            raise ModelError(
                f"the artifact {what.format(our_count)}, but the original {their_count}",
                hint="Compare with the model that the artifact was made from.",
            )
