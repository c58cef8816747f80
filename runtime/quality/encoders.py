"""Measures of how well an approximation of an encoder's weights preserves its embeddings, over some
sentences.

Search depends on which texts are near each other, so in addition to each embedding's own change the
order of all similarities is compared. This module knows nothing of text or tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import ModelError
from ..models.encoder import Encoder


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
    approximate: Encoder, exact: Encoder, token_lists: Sequence[Sequence[int]]
) -> EncoderQuality:
    """Embed the sentences with both, and compare all pairs. Tokens include the special ones, and
    fit the model.

    Raises `ModelError` for embeddings that are not finite, and the errors of `Encoder.embed`.
    """
    ours, theirs = (  # (N, hidden_size)
        torch.from_numpy(model.embed(token_lists)) for model in (approximate, exact)
    )
    cosines = F.cosine_similarity(ours.double(), theirs.double(), dim=-1)
    if not bool(cosines.isfinite().all()):
        raise ModelError(
            "the embeddings of this model are not finite numbers",
            hint="Check the artifact with `teneral verify`: its bytes may be damaged.",
        )
    correlation = same_nearest = None
    if len(token_lists) > 2:
        similarities = [_similarities(embeddings) for embeddings in (ours, theirs)]
        correlation = _rank_correlation(*similarities)
        nearest = [(matrix - 4.0 * torch.eye(len(matrix))).argmax(-1) for matrix in similarities]
        same_nearest = float((nearest[0] == nearest[1]).double().mean())
    return EncoderQuality(
        sentences=len(token_lists),
        cosine=float(cosines.mean()),
        worst_cosine=float(cosines.min()),
        worst_sentence=int(cosines.argmin()),
        rank_correlation=correlation,
        same_nearest=same_nearest,
    )


def _similarities(embeddings: torch.Tensor) -> torch.Tensor:
    """Cosines of all pairs, (N, N) float64."""
    unit = F.normalize(embeddings.double(), dim=-1)
    return unit @ unit.T


def _rank_correlation(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Spearman's, of the pairs above the diagonal."""
    rows, columns = torch.triu_indices(len(ours), len(ours), offset=1)
    our_ranks, their_ranks = (_ranks(matrix[rows, columns]) for matrix in (ours, theirs))
    return float(F.cosine_similarity(our_ranks - our_ranks.mean(), their_ranks - their_ranks.mean(), dim=0))


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Each value's rank; equal values share their mean rank."""
    ordered = values.sort().values
    below, reached = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    return (below + reached).double() / 2
