"""`[[patch]]`: JSON merge patches (RFC 7386) on rendered documents, applied last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...handlers.pool.values import Code
from .documents import Document, Rendering


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386's result: mappings are merged, null removes, everything else replaces. Changes neither argument."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def apply_patches(
    rendering: Rendering, documents: Iterable[Document], *, every: bool = True
) -> list[Document]:
    """The documents with the file's patches for this platform. A patch that changes a rendered value, instead of adding
    one, is W4; one that fits no document is E2 where these are `every` document of the pool.
    """
    patched = list(documents)
    for patch in rendering.pool.patches:
        if patch.platform != rendering.platform:
            continue
        fits = [
            number
            for number, document in enumerate(patched)
            if document.kind == patch.kind and patch.name in (None, document.name)
        ]
        if not fits and every:
            named = sorted({f"{document.kind} {document.name}" for document in patched})
            raise rendering.pool.error(
                Code.E2,
                f"fits none of {rendering.platform}'s documents",
                "patch",
                str(patch.index),
                hint=f"There are {', '.join(named)}.",
            )
        for number in fits:
            document = patched[number]
            for path in changed_values(document.body, patch.merge):
                warning = rendering.pool.warning(
                    Code.W4,
                    f"changes {'.'.join(path)} of {document.kind} {document.name}",
                    "patch",
                    str(patch.index),
                )
                if warning not in rendering.warnings:
                    rendering.warnings.append(warning)
            patched[number] = replace(document, body=merge_patch(document.body, patch.merge))
    return patched


def changed_values(
    target: Any, patch: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Paths of values that are there and that the patch changes or removes."""
    for key, value in patch.items():
        if not isinstance(target, Mapping) or key not in target:
            continue
        here, before = (*path, key), target[key]
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            yield from changed_values(before, value, here)
        elif before != value:
            yield here
