"""Preprocessing and postprocessing for handlers: `from teneral.handlers.contrib import processing`.

Optional plain functions and small values over the public API of `context.model`. The names here are
public (docs/processing.md), and imported on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .actions import act, post_json, publish_sns, send_sqs
    from .chunking import Chunk, Chunker, achunks, chunks
    from .combine import amap_reduce, embed_long, map_reduce, mean_vector
    from .filters import Redact, Refuse
    from .images import Normalisation, center_crop, decode_image, resize, stack_images, to_array
    from .labels import Prediction, Prototypes, achoose, choose, decide, sigmoid, softmax
    from .pipeline import handler
    from .tokens import acount_tokens, atruncate, count_tokens, truncate

_HOMES = {
    "actions": ("act", "post_json", "publish_sns", "send_sqs"),
    "chunking": ("Chunk", "Chunker", "achunks", "chunks"),
    "combine": ("amap_reduce", "embed_long", "map_reduce", "mean_vector"),
    "filters": ("Redact", "Refuse"),
    "images": ("Normalisation", "center_crop", "decode_image", "resize", "stack_images", "to_array"),
    "labels": ("Prediction", "Prototypes", "achoose", "choose", "decide", "sigmoid", "softmax"),
    "pipeline": ("handler",),
    "tokens": ("acount_tokens", "atruncate", "count_tokens", "truncate"),
}

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
