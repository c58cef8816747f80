"""The report of an evaluation, as JSON and as a table, without measuring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...loader.format.manifest import Manifest
from ...loader.tools.progress_bar import format_bytes
from .decoders import DecoderQuality, DraftAcceptance
from .encoders import EncoderQuality
from .text import EvaluationText

SCHEMA = 1
# The figures of shorter texts are only a first impression.
SMALL_TOKENS = 2000

Row = tuple[str, str, str]  # measure, value of the exact model, value of the tier


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier that makes a usable model, before the later ones have arrived."""

    name: str
    # To fetch before it is usable, earlier tiers included.
    stored_bytes: int
    quality: DecoderQuality | EncoderQuality


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The report. `tiers` is empty and `num_tokens` 0 for an artifact with only one tier."""

    url: str
    digest: bytes
    encodings: dict[str, int]  # → number of tensors with that encoding
    weight_bytes: int  # decoded
    stored_bytes: int  # all tiers
    text: EvaluationText
    num_tokens: int  # of the text, as used
    sentences: tuple[str, ...]  # an encoder's inputs
    tiers: tuple[TierReport, ...]

    @classmethod
    def of(
        cls,
        url: str,
        manifest: Manifest,
        text: EvaluationText,
        *,
        num_tokens: int = 0,
        sentences: tuple[str, ...] = (),
        tiers: tuple[TierReport, ...] = (),
    ) -> EvaluationReport:
        """Make a report with the figures of a packed artifact's manifest."""
        assert manifest.digest is not None
        return cls(
            url=url,
            digest=manifest.digest,
            encodings=dict(Counter(tensor.encoding.value for tensor in manifest.tensors)),
            weight_bytes=manifest.weight_bytes,
            stored_bytes=sum(part.size_bytes for part in manifest.parts),
            text=text,
            num_tokens=num_tokens,
            sentences=sentences,
            tiers=tiers,
        )

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON-ready value."""
        return {
            "schema": SCHEMA,
            "url": self.url,
            "digest": self.digest.hex(),
            "encodings": self.encodings,
            "weight_bytes": self.weight_bytes,
            "stored_bytes": self.stored_bytes,
            "text": {"file": self.text.name, "tokens": self.num_tokens},
            "tiers": [_tier_json(tier) for tier in self.tiers],
        }

    def render(self) -> str:
        """The report for a terminal: the compared models, and a table for each tier."""
        head = [f"artifact   {self.url}@b3:{self.digest.hex()}", f"encodings  {self._encodings()}"]
        if not self.tiers:
            return "\n".join(
                [*head, "", "exact only: this artifact has one tier, so there is no draft to compare it with"]
            )
        tables = ["\n".join(self._table(tier)) for tier in self.tiers]
        return "\n\n".join(
            ["\n".join([*head, f"text       {describe_text(self.text, self.num_tokens)}"]), *tables]
        )

    def _encodings(self) -> str:
        return ", ".join(f"{count} tensors {name}" for name, count in sorted(self.encodings.items()))

    def _table(self, tier: TierReport) -> list[str]:
        rows: list[Row] = [
            ("", "exact", tier.name),
            ("stored", format_bytes(self.stored_bytes), format_bytes(tier.stored_bytes)),
            ("of the weights", self._share(self.stored_bytes), self._share(tier.stored_bytes)),
        ]
        if isinstance(tier.quality, DecoderQuality):
            rows += decoder_rows(tier.quality)
        else:
            rows += _encoder_rows(tier.quality)
        lines = aligned(rows)
        if isinstance(tier.quality, EncoderQuality):
            lines.append(f"worst sentence: {self.sentences[tier.quality.worst_sentence][:200]!r}")
        return lines

    def _share(self, stored_bytes: int) -> str:
        return f"{stored_bytes / self.weight_bytes:.1%}" if self.weight_bytes else "–"


def describe_text(text: EvaluationText, num_tokens: int) -> str:
    """The name of the text, the number of tokens used, and advice if they are too few."""
    what = f"{text.name or 'built in'}, {num_tokens:,} tokens"
    if num_tokens >= SMALL_TOKENS:
        return what
    advice = "" if text.name else "; use text like your own with --text FILE"
    return f"{what}: small, so take the figures as a first impression{advice}"


def _tier_json(tier: TierReport) -> dict[str, Any]:
    return {"name": tier.name, "stored_bytes": tier.stored_bytes, **quality_json(tier.quality)}


def quality_json(quality: DecoderQuality | EncoderQuality) -> dict[str, Any]:
    """The quality as a JSON-ready value; `kind` distinguishes decoders and encoders."""
    figures = asdict(quality)
    if isinstance(quality, DecoderQuality):
        figures["accepted"] = _acceptance_json(quality.accepted)
        figures["exact_accepted"] = _acceptance_json(quality.exact_accepted)
    kind = "decoder" if isinstance(quality, DecoderQuality) else "encoder"
    return {"kind": kind, **figures}


def _acceptance_json(acceptance: DraftAcceptance) -> dict[str, Any]:
    return {
        "mean": acceptance.mean,
        "mean_error": acceptance.mean_error,
        "drafted": acceptance.drafted,
        "places": list(acceptance.accepted),
    }


def decoder_rows(quality: DecoderQuality) -> list[Row]:
    """The measures of the exact model and of the other."""
    ratio = f"{quality.perplexity_ratio:.4f} ± {quality.perplexity_ratio_error:.4f}"
    exact_accepted, accepted = quality.exact_accepted, quality.accepted
    drafted, places = accepted.drafted, len(accepted.accepted)
    return [
        ("perplexity", f"{quality.exact_perplexity:.3f}", f"{quality.perplexity:.3f}"),
        ("  of the exact model's", "", ratio),
        (f"same next token ({quality.predictions:,})", "", f"{quality.agreement:.1%}"),
        (f"accepted of {drafted} drafted, mean of {places} places", _mean(exact_accepted), _mean(accepted)),
        ("  all of them accepted", f"{exact_accepted.whole_share:.1%}", f"{accepted.whole_share:.1%}"),
        ("total variation of the next token", "", f"{quality.total_variation:.4f}"),
        ("KL(exact ‖ this), nats", "", f"{quality.kl_nats:.5f}"),
        ("cosine of the last hidden states, mean", "", f"{quality.hidden_cosine:.5f}"),
        ("  worst", "", f"{quality.worst_hidden_cosine:.5f}"),
    ]


def _mean(acceptance: DraftAcceptance) -> str:
    return f"{acceptance.mean:.1f} ± {acceptance.mean_error:.1f}"


def _encoder_rows(quality: EncoderQuality) -> list[Row]:
    rows = [
        (f"cosine of the embeddings, mean of {quality.sentences} sentences", "", f"{quality.cosine:.5f}"),
        ("  worst", "", f"{quality.worst_cosine:.5f}"),
    ]
    if quality.rank_correlation is not None and quality.same_nearest is not None:
        rows += [
            ("rank correlation of the similarities", "", f"{quality.rank_correlation:.5f}"),
            ("same nearest sentence", "", f"{quality.same_nearest:.1%}"),
        ]
    return rows


def aligned(rows: Sequence[Row]) -> list[str]:
    """The lines of a table whose first row is its header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{name:<{widths[0]}}  {exact:>{widths[1]}}  {this:>{widths[2]}}".rstrip()
        for name, exact, this in rows
    ]
    return [lines[0], "─" * (sum(widths) + 4), *lines[1:]]
