"""From a model's results to an answer: scores to labels, and the results of a text's chunks combined into one.

Scores come from a classifier's head, from the similarity of embeddings to examples (`Prototypes`), or from a language
model's probabilities of the labels as its next words (`choose`); they become probabilities, thresholds and abstentions.
`mean_vector` combines embeddings; `map_reduce` texts, which are reduced in rounds until they fit into one prompt. The
caller's functions call the model: this module knows nothing of prompts, nor of the use of a label.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....runtime.errors import RequestError
from .chunking import chunks

if TYPE_CHECKING:
    import numpy as np

    from ...function.context import Model, Prompt
    from ...function.streams import Completion

# The engine's maximum of log probabilities for one token.
MAX_CHOICES = 20
# With this bias on the labels, all other tokens have almost no probability.
_BIAS = 100.0

Labels = Mapping[int, str] | Sequence[str] | Mapping[str, str]  # the last as JSON has it: {"0": "spam"}
# Of one text: more would cost a lot, probably by mistake.
MAX_PARTS = 10_000
EMBEDDED_TOGETHER = 256  # chunks in one call of the model
# Parts processed at a time; the engine batches them.
MAX_CONCURRENT = 8


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
    """The chosen label, for async handlers."""
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


def mean_vector(
    vectors: np.ndarray[Any, Any], weights: Sequence[float], *, normalize: bool = True
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(N, dim) → (dim,) float32: the weighted mean of the vectors of a text's chunks, for instance
    by their tokens.

    Normalised to unit length by default. Raises `RequestError` without vectors, or for weights that
    do not fit.
    """
    import numpy as np  # 68 ms that a handler of texts need not pay

    factors = np.asarray(weights, dtype=np.float64)
    if vectors.ndim != 2 or factors.shape != (len(vectors),):
        raise RequestError(f"{len(weights)} weights were given for vectors of shape {vectors.shape}")
    if not len(vectors) or not np.isfinite(factors).all() or factors.min() < 0 or factors.sum() <= 0:
        raise RequestError("weights must be numbers of at least 0, and one of them above 0")
    mean = factors @ vectors.astype(np.float64) / factors.sum()
    length = float(np.linalg.norm(mean))
    result: np.ndarray[Any, np.dtype[np.float32]] = (mean / length if normalize and length else mean).astype(
        np.float32
    )
    return result


def embed_long(
    model: Model, texts: Sequence[str], *, max_tokens: int, overlap_tokens: int = 0
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(N, dim) float32 embeddings of texts of any length, for plain handlers.

    Texts of more than `max_tokens` get the mean of their chunks, weighted by tokens, with unit
    length if the model's vectors have it.
    """
    import numpy as np  # as above

    parts: list[tuple[int, str, int]] = []  # (text, chunk, its tokens)
    for index, text in enumerate(texts):
        found = [
            (index, chunk.text, chunk.num_tokens)
            for chunk in chunks(model, text, max_tokens=max_tokens, overlap_tokens=overlap_tokens)
        ]
        parts += found or [(index, text, 1)]
    vectors = np.concatenate(
        [
            model.embed([text for _, text, _ in parts[start : start + EMBEDDED_TOGETHER]])
            for start in range(0, len(parts), EMBEDDED_TOGETHER)
        ]
        # Raises the error for an empty input.
        or [model.embed([])]
    )
    is_unit = bool(np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3))
    rows = []
    for _, group in itertools.groupby(range(len(parts)), key=lambda number: parts[number][0]):
        numbers = list(group)
        weights = [max(1, parts[number][2]) for number in numbers]
        rows.append(
            mean_vector(vectors[numbers], weights, normalize=is_unit)
            if len(numbers) > 1
            else vectors[numbers[0]]
        )
    return np.stack(rows)


def map_reduce(
    parts: Iterable[str],
    *,
    each: Callable[[str], str],
    together: Callable[[Sequence[str]], str],
    fan_in: int = 8,
) -> str:
    """Apply `each` to the parts, then `together` to up to `fan_in` results at a time, round after
    round, until one is left.

    One part is not combined; no part gives ''. Calls are sequential; `amap_reduce` makes some
    concurrently. Raises `RequestError` for more than 10,000 parts, and the errors of the two
    functions.
    """
    _check_fan_in(fan_in)
    results = [each(part) for part in _bounded(parts)]
    while len(results) > 1:
        results = [together(group) if len(group) > 1 else group[0] for group in _groups(results, fan_in)]
    return results[0] if results else ""


async def amap_reduce(
    parts: Iterable[str],
    *,
    each: Callable[[str], Awaitable[str]],
    together: Callable[[Sequence[str]], Awaitable[str]],
    fan_in: int = 8,
    concurrent: int = MAX_CONCURRENT,
) -> str:
    """The async form of `map_reduce`, with up to `concurrent` calls at a time. The first error
    cancels the others.
    """
    _check_fan_in(fan_in)

    async def join(group: Sequence[str]) -> str:
        return await together(group) if len(group) > 1 else group[0]

    results = await _all_of(each, _bounded(parts), concurrent)
    while len(results) > 1:
        results = await _all_of(join, _groups(results, fan_in), concurrent)
    return results[0] if results else ""


async def _all_of(work: Callable[[Any], Awaitable[str]], items: Iterable[Any], concurrent: int) -> list[str]:
    """Results in the order of the items, which are read as capacity becomes free."""
    results: list[str] = []
    source = enumerate(items)

    async def work_on() -> None:
        # Shared by all workers of the event loop: each takes the next item.
        for index, item in source:
            results.extend([""] * (index + 1 - len(results)))
            results[index] = await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, concurrent)):
                group.create_task(work_on())
    except BaseExceptionGroup as errors:
        # The first error; the others were cancelled because of it.
        raise errors.exceptions[0] from None
    return results


def _bounded(parts: Iterable[str]) -> Iterator[str]:
    for index, part in enumerate(parts):
        if index == MAX_PARTS:
            raise RequestError(f"the text has more than {MAX_PARTS} parts", hint="Make them longer.")
        yield part


def _groups(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    source = iter(items)
    while group := list(itertools.islice(source, size)):
        yield group


def _check_fan_in(fan_in: int) -> None:
    if fan_in < 2:
        raise RequestError(
            f"fan_in is {fan_in}, but must be 2 or more: smaller values would not reduce anything",
            param="fan_in",
        )
