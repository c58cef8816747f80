"""What was computed for the chunks of a text, made into one result for the text.

`mean_vector` for embeddings; `map_reduce` for texts, which are reduced in rounds until they fit into one prompt. The
model is asked by functions that the caller gives: nothing is known here of prompts.
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

MAX_PARTS = 10_000  # of one text: beyond, somebody pays for much that nobody meant
EMBEDDED_TOGETHER = 256  # chunks in one call of the model
MAX_CONCURRENT = 8  # parts that are worked on at a time; the engine batches them


def mean_vector(
    vectors: np.ndarray[Any, Any], weights: Sequence[float], *, normalize: bool = True
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(N, dim) → (dim,) float32: the mean of a text's chunks' vectors, each weighted, as by its number of tokens.

    To unit length unless told otherwise. Raises `RequestError` for nothing, or for weights that do not fit.
    """
    import numpy as np  # 68 ms that a handler of texts need not pay

    factors = np.asarray(weights, dtype=np.float64)
    if vectors.ndim != 2 or factors.shape != (len(vectors),):
        raise RequestError(f"{len(weights)} weights were given for vectors of shape {vectors.shape}")
    if not len(vectors) or not np.isfinite(factors).all() or factors.min() < 0 or factors.sum() <= 0:
        raise RequestError("weights must be numbers from 0 on, and one of them more")
    mean = factors @ vectors.astype(np.float64) / factors.sum()
    length = float(np.linalg.norm(mean))
    result: np.ndarray[Any, np.dtype[np.float32]] = (mean / length if normalize and length else mean).astype(
        np.float32
    )
    return result


def embed_long(
    model: Model, texts: Sequence[str], *, max_tokens: int, overlap_tokens: int = 0
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(N, dim) float32 of texts of any length: those of more than `max_tokens` as the mean of their chunks, weighted by
    tokens, and of unit length where the model's vectors are. For plain handlers.
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
        or [model.embed([])]  # which says that there is nothing to embed
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
    """`each` of the parts, then `together` of up to `fan_in` results at a time, round after round, until one is left.

    One part is not put together with anything; no part gives ''. Calls follow each other; `amap_reduce` has some at a
    time. Raises `RequestError` for more than 10,000 parts, and whatever the two functions raise.
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
    """As `map_reduce`, with up to `concurrent` calls at a time. The first that fails ends the others."""
    _check_fan_in(fan_in)

    async def join(group: Sequence[str]) -> str:
        return await together(group) if len(group) > 1 else group[0]

    results = await _all_of(each, _bounded(parts), concurrent)
    while len(results) > 1:
        results = await _all_of(join, _groups(results, fan_in), concurrent)
    return results[0] if results else ""


async def _all_of(work: Callable[[Any], Awaitable[str]], items: Iterable[Any], concurrent: int) -> list[str]:
    """Results in the order of the items, which are taken as there is room for them."""
    results: list[str] = []
    source = enumerate(items)

    async def work_on() -> None:
        for index, item in source:  # shared by all: each takes the next one, on one event loop
            results.extend([""] * (index + 1 - len(results)))
            results[index] = await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, concurrent)):
                group.create_task(work_on())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # what went wrong first; the others were cancelled for it
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
            f"fan_in is {fan_in}, but must be 2 or more: or nothing would get fewer", param="fan_in"
        )
