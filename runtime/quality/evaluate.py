"""Comparison of a model's first tiers with the exact model, over one text; and a decoder with all
its weights in memory.

Invariant: at most two models are in memory. A part is read once; of three tiers, those of the
middle one twice. The measures are in `decoders.py` and `encoders.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...loader.artifact import open_artifact
from ...loader.errors import UsageError
from ...loader.format.manifest import Manifest, Part, Tier
from ...loader.load.options import LoadOptions
from ...loader.memory.limits import MIB, available, check_fits
from ...loader.sources.base import Source
from ...loader.tools.part_reader import PartReader
from ...loader.tools.progress_bar import TransferProgress
from ..backends.choose import AUTO, BackendChoice
from ..files import ModelFiles
from ..models.build import build_model, sentence_files
from ..models.decoder import Decoder
from ..models.encoder import Encoder
from ..models.pooled_decoder import PooledDecoder
from .decoders import DecoderQuality, compare_decoders
from .encoders import EncoderQuality, compare_encoders
from .report import EvaluationReport, TierReport
from .text import MIN_TOKENS, EvaluationText, InputReader
from .tiers import TieredWeights, usable_tiers

MAX_TOKENS = 1 << 20
# In addition to two models: parts being read, then activations, logits, keys and values.
WORK_BYTES = 512 * MIB

OnProgress = Callable[[TransferProgress], None]
Compare = Callable[[], DecoderQuality | EncoderQuality]
Built = Decoder | Encoder | PooledDecoder


def evaluate_draft(
    source: Source,
    text: EvaluationText,
    *,
    digest: bytes | None = None,
    max_tokens: int = 2048,
    threads: int | None = None,
    progress: OnProgress | None = None,
) -> EvaluationReport:
    """Compare the model of each tier with the exact one, over the first `max_tokens` tokens of the
    text.

    Blocks; `progress` is called from this thread while `threads` threads read. The backend is the
    one that a server would choose. Raises `UsageError` for plain safetensors,
    `InsufficientMemoryError` if two models do not fit, `ModelError` for a model that cannot be run,
    `IntegrityError` naming a bad part, and the source's errors.
    """
    check_max_tokens(max_tokens)
    manifest = open_artifact(source, digest=digest)
    if manifest.digest is None:
        raise UsageError(
            f"{source.url} is plain safetensors, which have no draft",
            hint="Pack it first: teneral pack MODEL ARTIFACT.",
        )
    drafts = usable_tiers(manifest)[:-1]
    if not drafts:
        return EvaluationReport.of(source.url, manifest, text)
    comparison = _Comparison(source, manifest, text, max_tokens)
    reading = _Reading(PartReader(source, manifest), threads, progress, _bytes_to_read(manifest, drafts))
    return EvaluationReport.of(
        source.url,
        manifest,
        text,
        num_tokens=comparison.num_tokens,
        sentences=comparison.sentences,
        tiers=comparison.run(drafts, reading),
    )


def check_max_tokens(max_tokens: int) -> None:
    """Raise `UsageError` for a number of tokens that is too small to measure, or too large."""
    if not MIN_TOKENS <= max_tokens <= MAX_TOKENS:
        raise UsageError(
            f"max_tokens must be from {MIN_TOKENS} to {MAX_TOKENS}, not {max_tokens}", key="max_tokens"
        )


class PartCounter:
    """Reports the progress of reading, over all parts of all models."""

    def __init__(self, progress: OnProgress | None, total_bytes: int) -> None:
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = total_bytes

    def __call__(self, part: Part) -> None:
        self._done_bytes += part.size_bytes
        if self._progress is not None:
            self._progress(TransferProgress(self._done_bytes, self._total_bytes))


class _Reading:
    """Fills weights, and reports progress."""

    def __init__(
        self, parts: PartReader, threads: int | None, on_progress: OnProgress | None, total_bytes: int
    ) -> None:
        self._parts = parts
        self._threads = threads
        self._on_progress = on_progress
        self._done_bytes = 0
        self._total_bytes = total_bytes

    def fill(self, weights: TieredWeights, tier: Tier) -> None:
        weights.fill(tier, self._parts, threads=self._threads, on_part=self._count)

    def _count(self, part: Part) -> None:
        self._done_bytes += part.size_bytes
        if self._on_progress is not None:
            self._on_progress(TransferProgress(self._done_bytes, self._total_bytes))


class _Comparison:
    """Both models and their inputs. Errors that need no weights are raised by the constructor."""

    def __init__(self, source: Source, manifest: Manifest, text: EvaluationText, max_tokens: int) -> None:
        check_fits(
            2 * manifest.weight_bytes + WORK_BYTES,
            available(),
            what="evaluating this draft",
            made_of="the exact weights, the draft's, and room to compute in",
        )
        self._manifest = manifest
        self._weights, self._exact_weights = TieredWeights(manifest), TieredWeights(manifest)
        files = ModelFiles(source, manifest, LoadOptions())
        model, exact = (_build(files, weights) for weights in (self._weights, self._exact_weights))
        self.sentences: tuple[str, ...] = ()
        self._compare: Compare
        if isinstance(exact, Decoder):
            assert isinstance(model, Decoder)  # the config is the same
            read = InputReader(files).for_decoder(text, max_tokens)
            self.num_tokens = len(read.tokens)
            self._compare = lambda: compare_decoders(model, exact, read.tokens, prefix=read.prefix)
        else:
            assert not isinstance(model, Decoder)
            inputs = InputReader(files).for_encoder(
                text, max_tokens, max_sentence_tokens=exact.config.max_tokens
            )
            self.num_tokens, self.sentences = inputs.num_tokens, inputs.sentences
            self._compare = lambda: compare_encoders(model, exact, inputs.token_lists)

    def run(self, drafts: Sequence[Tier], reading: _Reading) -> tuple[TierReport, ...]:
        """A report for each of these tiers, which are in order."""
        reading.fill(self._weights, drafts[0])
        self._exact_weights.copy_(self._weights)
        reading.fill(self._exact_weights, Tier.REFINE)
        reports = []
        for tier in drafts:
            reading.fill(self._weights, tier)
            stored_bytes = sum(part.size_bytes for part in self._manifest.parts if part.tier <= tier)
            reports.append(TierReport(tier.name.lower(), stored_bytes, self._compare()))
        return tuple(reports)


def _build(files: ModelFiles, weights: TieredWeights) -> Built:
    """The model over weights whose content may not have arrived. Raises `UsageError` for one that transcribes sound."""
    config = files.json("config.json", required=True)
    given = sentence_files(files, config)
    return _reading_text(build_model(config, weights.tensors(), BackendChoice().model_backends(), **given))


def _reading_text(model: Built) -> Built:
    if isinstance(model, Decoder) and model.config.speech is not None:
        raise UsageError(
            "a model that transcribes sound reads no text, by which drafts are measured and models calibrated",
            hint="Pack it with --no-calibrate.",
        )
    return model


def _bytes_to_read(manifest: Manifest, drafts: Sequence[Tier]) -> int:
    once = sum(part.size_bytes for part in manifest.parts)
    return once + sum(part.size_bytes for part in manifest.parts if drafts[0] < part.tier <= drafts[-1])


class WholeDecoder:
    """`decoder`, over loaded weights, and its small `files`. Memory: the weights as stored."""

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        *,
        threads: int | None,
        on_part: PartCounter,
        compute_dtype: str = AUTO,
    ) -> None:
        """Read the model. Blocks; `on_part` is called from this thread. `compute_dtype` is `AUTO` or a
        name as in config.json.

        Raises `UsageError` for an encoder, `ModelError` for a model that no backend computes,
        `IntegrityError` naming a bad part, and the source's errors.
        """
        self.files = ModelFiles(source, manifest, LoadOptions())
        weights = TieredWeights(manifest)
        built = _reading_text(
            build_model(
                self.files.json("config.json", required=True),
                weights.tensors(),
                BackendChoice(compute_dtype=compute_dtype).model_backends(),
            )
        )
        if not isinstance(built, Decoder):
            raise UsageError(
                f"{source.url} is an encoder, but only decoders can be compared and calibrated",
                hint="Use `teneral eval-draft` for an encoder's draft.",
            )
        self.decoder = built
        for tier in usable_tiers(manifest)[-1:]:
            weights.fill(tier, PartReader(source, manifest), threads=threads, on_part=on_part)
