"""The combination of the results of a text's chunks into one.

`mean_vector` for embeddings; `map_reduce` for texts, which are reduced in rounds until they fit
into one prompt. The caller's functions call the model: this module knows nothing of prompts.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ....runtime.errors import RequestError
from .chunking import chunks

if TYPE_CHECKING:
    import numpy as np

    from ...function.model import Model

# Of one text: more would cost a lot, probably by mistake.
MAX_PARTS = 10_000
EMBEDDED_TOGETHER = 256  # chunks in one call of the model
# Parts processed at a time; the engine batches them.
MAX_CONCURRENT = 8


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
