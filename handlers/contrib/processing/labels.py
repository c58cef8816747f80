"""From scores to labels: probabilities, thresholds, and abstaining.

Scores come from a classifier's head, from the similarity of embeddings to examples (`Prototypes`),
or from a language model's probabilities of the labels as its next words (`choose`). This module
does not know the use of a label.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....runtime.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

    from ...function.model import Model, Prompt
    from ...function.streams import Completion

# The engine's maximum of log probabilities for one token.
MAX_CHOICES = 20
# With this bias on the labels, all other tokens have almost no probability.
_BIAS = 100.0

Labels = Mapping[int, str] | Sequence[str] | Mapping[str, str]  # the last as JSON has it: {"0": "spam"}


@dataclass(frozen=True, slots=True)
class Prediction:
    """A decision. `label` is None for abstaining: no score reached the threshold."""

    label: str | None
    score: float  # of the best label, even below the threshold
    scores: tuple[tuple[str, float], ...]  # best first
    labels: tuple[str, ...] = ()  # all that reached the threshold, best first

    @property
    def abstained(self) -> bool:
        return self.label is None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready value."""
        return {
            "label": self.label,
            "score": self.score,
            "labels": list(self.labels),
            "scores": dict(self.scores),
        }


def softmax(scores: Sequence[float], *, temperature: float = 1.0) -> list[float]:
    """Probabilities of exclusive labels. A `temperature` above 1 makes them less certain, as
    calibration often requires.
    """
    values = _finite(scores, temperature)
    best = max(values)
    powers = [math.exp((value - best) / temperature) for value in values]
    total = math.fsum(powers)
    return [power / total for power in powers]


def sigmoid(scores: Sequence[float], *, temperature: float = 1.0) -> list[float]:
    """Independent probabilities of labels, several of which may be true."""
    return [_logistic(value / temperature) for value in _finite(scores, temperature)]


def decide(
    scores: Sequence[float] | Mapping[str, float],
    labels: Labels | None = None,
    *,
    threshold: float = 0.0,
    top_k: int | None = None,
) -> Prediction:
    """The best label if its score is at least `threshold`, else none.

    `scores` are by position, with `labels` for their names (a list, or a config's `id2label`), or
    by name. `top_k` is the number of scores kept in the prediction. Raises `RequestError` for
    scores and labels that do not match.
    """
    named = _named(scores, labels)
    if top_k is not None and top_k < 1:
        raise RequestError(f"top_k is {top_k}, but must be 1 or more", param="top_k")
    ranked = sorted(named, key=lambda item: -item[1])  # ties keep their order
    sure = tuple(name for name, score in ranked if score >= threshold)
    label, score = ranked[0]
    return Prediction(label if sure else None, score, tuple(ranked[:top_k]), sure)


class Prototypes:
    """Labels defined by examples: each is the mean of its examples' vectors, compared by cosine
    similarity.
    """

    def __init__(self, vectors: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Vectors (N, dim) of each label's examples, as `context.model.embed` gives them; kept as means."""
        from .combine import mean_vector

        if not vectors:
            raise RequestError("there are no labels")
        self.names = tuple(vectors)
        self._means = [mean_vector(examples, [1.0] * len(examples)) for examples in vectors.values()]

    def scores(self, vector: np.ndarray[Any, Any]) -> dict[str, float]:
        """The cosine similarity of each label to (dim,) `vector`: from -1 to 1."""
        import numpy as np  # as in `mean_vector`

        length = float(np.linalg.norm(vector)) or 1.0
        return {
            name: float(mean @ vector) / length for name, mean in zip(self.names, self._means, strict=True)
        }


def choose(
    model: Model, prompt: Prompt, labels: Sequence[str], *, temperature: float = 1.0, **options: Any
) -> dict[str, float]:
    """The model's probabilities of continuing with each of the labels, and only these: they add up
    to 1.

    One step of the model, for labels of any length: only their first tokens are compared, so these
    must differ. Spaces count: after "Sentiment:" a label usually begins with one. `options` are
    those of `generate`. Raises `RequestError` for labels with the same first token.
    """
    tokens = _first_tokens(labels, [model.tokenize(label, add_special_tokens=False) for label in labels])
    return _scores_of(model.generate(prompt, **_constrained(tokens, options)), tokens, temperature)


async def achoose(
    model: Model, prompt: Prompt, labels: Sequence[str], *, temperature: float = 1.0, **options: Any
) -> dict[str, float]:
    """As `choose`, for async handlers."""
    encoded = [await model.atokenize(label, add_special_tokens=False) for label in labels]
    tokens = _first_tokens(labels, encoded)
    return _scores_of(await model.agenerate(prompt, **_constrained(tokens, options)), tokens, temperature)


def _first_tokens(labels: Sequence[str], encoded: Sequence[Sequence[int]]) -> dict[str, int]:
    if not 2 <= len(labels) <= MAX_CHOICES:
        raise RequestError(
            f"{len(labels)} labels were given, but it must be 2 to {MAX_CHOICES}", param="labels"
        )
    owner: dict[int, str] = {}
    for label, tokens in zip(labels, encoded, strict=True):
        if not tokens:
            raise RequestError(f"the label {label!r} has no tokens", param="labels")
        if tokens[0] in owner:
            raise RequestError(
                f"the labels {owner[tokens[0]]!r} and {label!r} begin with the same token",
                param="labels",
                hint="Have the prompt number them, and choose among the numbers or letters.",
            )
        owner[tokens[0]] = label
    return {label: token for token, label in owner.items()}


def _constrained(tokens: Mapping[str, int], options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **options,
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": len(tokens),
        "logit_bias": dict.fromkeys(tokens.values(), _BIAS),
    }


def _scores_of(completion: Completion, tokens: Mapping[str, int], temperature: float) -> dict[str, float]:
    logprobs = dict(completion.logprobs[0].top)
    # A label that is not among the best in spite of its bias has a negligible probability.
    found = [logprobs.get(token, -_BIAS) for token in tokens.values()]
    return dict(zip(tokens, softmax(found, temperature=temperature), strict=True))


def _named(scores: Sequence[float] | Mapping[str, float], labels: Labels | None) -> list[tuple[str, float]]:
    if isinstance(scores, Mapping):
        if labels is not None:
            raise RequestError("the scores have names already", param="labels")
        names, values = list(scores), list(scores.values())
    else:
        values = list(scores)
        names = [_name_of(labels, index) for index in range(len(values))]
        if labels is not None and len(labels) != len(values):
            raise RequestError(f"{len(values)} scores were given for {len(labels)} labels", param="labels")
    return list(zip(names, _finite(values, 1.0), strict=True))


def _name_of(labels: Labels | None, index: int) -> str:
    if labels is None:
        return str(index)
    table: Any = labels
    for key in (index, str(index)):
        try:
            return str(table[key])
        except (KeyError, IndexError, TypeError):
            continue
    raise RequestError(f"there is no label for score {index}", param="labels")


def _finite(scores: Sequence[float], temperature: float) -> list[float]:
    values = [float(score) for score in scores]
    if not values:
        raise RequestError("there are no scores", param="scores")
    if not all(math.isfinite(value) for value in values):
        raise RequestError("a score is not a finite number", param="scores")
    if not 0 < temperature < math.inf:
        raise RequestError(f"temperature is {temperature}, but must be above 0", param="temperature")
    return values


def _logistic(value: float) -> float:
    # Either form overflows on one side.
    return 1 / (1 + math.exp(-value)) if value >= 0 else (power := math.exp(value)) / (1 + power)
