"""Preprocessing and postprocessing for handlers: `from teneral.handlers.contrib import processing`.

Optional plain functions and small values over the public API of `context.model`. The names here are
public (docs/processing.md), and imported on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .actions import act, post_json, publish_sns, send_sqs
    from .chunking import Chunk, Chunker, achunks, acount_tokens, atruncate, chunks, count_tokens, truncate
    from .filters import Redact, Refuse
    from .images import Normalisation, center_crop, decode_image, resize, stack_images, to_array
    from .labels import (
        Prediction,
        Prototypes,
        achoose,
        amap_reduce,
        choose,
        decide,
        embed_long,
        map_reduce,
        mean_vector,
        sigmoid,
        softmax,
    )
    from .pipeline import handler

_HOMES = {
    "actions": ("act", "post_json", "publish_sns", "send_sqs"),
    "chunking": (
        "Chunk", "Chunker", "achunks", "acount_tokens", "atruncate", "chunks", "count_tokens", "truncate",
    ),
    "filters": ("Redact", "Refuse"),
    "images": ("Normalisation", "center_crop", "decode_image", "resize", "stack_images", "to_array"),
    "labels": (
        "Prediction", "Prototypes", "achoose", "amap_reduce", "choose", "decide", "embed_long",
        "map_reduce", "mean_vector", "sigmoid", "softmax",
    ),
    "pipeline": ("handler",),
}  # fmt: skip

__all__ = [
    "Chunk", "Chunker", "Normalisation", "Prediction", "Prototypes", "Redact", "Refuse", "achoose",
    "achunks", "acount_tokens", "act", "amap_reduce", "atruncate", "center_crop", "choose", "chunks",
    "count_tokens", "decide", "decode_image", "embed_long", "handler", "map_reduce", "mean_vector",
    "post_json", "publish_sns", "resize", "send_sqs", "sigmoid", "softmax", "stack_images", "to_array",
    "truncate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # A handler that chunks texts need not import the image modules.
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{home}"), name)
