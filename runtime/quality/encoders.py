"""Measures of how well an approximation of an encoder's weights preserves its embeddings, over some
sentences.

Search depends on which texts are near each other, so in addition to each embedding's own change the
order of all similarities is compared. This module knows nothing of text or tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import ModelError
from ..models.encoder import Encoder
from ..models.pooled_decoder import PooledDecoder

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EncoderQuality:
    """The result. `rank_correlation` and `same_nearest` are None with fewer than 3 sentences, which
    have no order.
    """

    sentences: int
    cosine: float  # mean over the sentences, between the two embeddings of each
    worst_cosine: float
    worst_sentence: int  # its index
    rank_correlation: float | None  # Spearman's, of the similarities of all pairs of sentences
    same_nearest: float | None  # share of sentences whose nearest other sentence is the same


def compare_encoders(
    approximate: Encoder | PooledDecoder, exact: Encoder | PooledDecoder, token_lists: Sequence[Sequence[int]]
) -> EncoderQuality:
    """Embed the sentences with both, and compare all pairs. Tokens include the special ones, and
    fit the model.

    Raises `ModelError` for embeddings that are not finite, and the errors of `Encoder.embed`.
    """
    ours, theirs = (_unit(model.embed(token_lists)) for model in (approximate, exact))  # (N, hidden_size)
    cosines = (ours * theirs).sum(-1)
    if not np.isfinite(cosines).all():
        raise ModelError(
            "the embeddings of this model are not finite numbers",
            hint="Check the artifact with `teneral verify`: its bytes may be damaged.",
        )
    correlation = same_nearest = None
    if len(token_lists) > 2:
        similarities = [unit @ unit.T for unit in (ours, theirs)]
        correlation = _rank_correlation(*similarities)
        nearest = [(matrix - 4.0 * np.eye(len(matrix))).argmax(-1) for matrix in similarities]
        same_nearest = float((nearest[0] == nearest[1]).mean())
    return EncoderQuality(
        sentences=len(token_lists),
        cosine=float(cosines.mean()),
        worst_cosine=float(cosines.min()),
        worst_sentence=int(cosines.argmin()),
        rank_correlation=correlation,
        same_nearest=same_nearest,
    )


def _unit(embeddings: npt.NDArray[np.float32]) -> Doubles:
    """The rows with length 1; those of zeros stay."""
    wide = embeddings.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=-1, keepdims=True)
    return wide / np.where(lengths == 0, 1.0, lengths)


def _rank_correlation(ours: Doubles, theirs: Doubles) -> float:
    """Spearman's, of the pairs above the diagonal."""
    pairs = np.triu_indices(len(ours), k=1)
    ranks = [_ranks(matrix[pairs]) for matrix in (ours, theirs)]
    our_unit, their_unit = (_unit((each - each.mean())[None]) for each in ranks)
    return float((our_unit * their_unit).sum())


def _ranks(values: Doubles) -> Doubles:
    """Each value's rank; equal values share their mean rank."""
    ordered = np.sort(values)
    below, reached = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return (below + reached) / 2
